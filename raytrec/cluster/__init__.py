"""The Ray that a run uses: addresses, tokens, local nodes, forked workers."""

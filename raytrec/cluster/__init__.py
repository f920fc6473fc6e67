"""Connections to Ray: addresses, tokens, local clusters, forked workers, preemption."""

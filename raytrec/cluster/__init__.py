"""Connections to Ray: addresses, tokens, local clusters, forked workers and preemption."""

"""Metrics over all ranks: only sums meet."""

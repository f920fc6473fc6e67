"""Metrics over all ranks: rows are sorted or grouped where they are, and only sums meet."""

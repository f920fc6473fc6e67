"""Checks of a run's correctness: live checks, and parity with a single process."""

"""Checks of a run's correctness: live ones, and parity with one process."""

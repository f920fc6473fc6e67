"""Checkpoints: what is in them, where they are, how they are written and read."""

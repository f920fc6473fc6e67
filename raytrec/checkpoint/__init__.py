"""Checkpoints: what is in them, where they lie, how they are written and read."""

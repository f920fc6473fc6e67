"""Checkpoints: contents, places, writing and reading."""

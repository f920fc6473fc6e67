"""Checkpoints: contents, locations, writing and reading."""

"""Checkpoints: their contents and locations, saving and loading."""

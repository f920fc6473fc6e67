"""Helpers that every package can use: errors, storage, texts and times."""

"""A run from the side of one rank; start reading with loop.py."""

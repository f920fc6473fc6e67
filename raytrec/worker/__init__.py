"""A run on one rank's side: start with loop.py."""

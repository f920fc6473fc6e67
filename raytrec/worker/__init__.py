"""Code of a run that each rank executes. Start reading with loop.py."""

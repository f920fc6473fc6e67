"""Part of a run that is executed on each rank; start reading with loop.py."""

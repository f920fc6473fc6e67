"""Pictures of a run: each function takes a RunFolder and gives a Figure, or None without data."""

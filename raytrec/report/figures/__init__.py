"""Pictures of a run: each function takes a History and gives a Figure, or None without data."""

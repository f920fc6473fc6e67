"""Code that each rank of a run executes. Start reading with trainer.py."""

"""Tasks, their losses, and one scalar of them all."""

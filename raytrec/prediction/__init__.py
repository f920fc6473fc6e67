"""`raytrec predict` and its files."""

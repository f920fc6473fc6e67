"""`raytrec tune`: many runs of one configuration."""

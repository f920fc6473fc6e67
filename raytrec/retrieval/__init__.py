"""Indexes of item vectors for `raytrec index`, and search in these indexes."""

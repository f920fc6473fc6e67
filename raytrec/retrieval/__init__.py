"""`raytrec index` and its search."""

"""`raytrec index`: item vectors, and search in them."""

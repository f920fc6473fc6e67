"""`raytrec serve`: exports behind HTTP, on Ray Serve."""

"""`raytrec serve`: HTTP services of exports on Ray Serve."""

"""`raytrec doctor`: what is wrong with this host, or with the nodes of a cluster. No torch."""

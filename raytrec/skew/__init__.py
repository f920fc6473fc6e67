"""`raytrec skew`: requests of a service compared with its export and with training data."""

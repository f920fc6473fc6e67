"""`raytrec skew`: comparison of a service's requests with its export and with training data."""

"""Compare a service's requests with its export and with training data, for `raytrec skew`."""

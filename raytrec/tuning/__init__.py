"""Hyperparameter search over runs of one configuration, for `raytrec tune`."""

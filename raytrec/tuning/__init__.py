"""`raytrec tune`: hyperparameter search over runs of one configuration."""

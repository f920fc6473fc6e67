"""Runs followed from outside the cluster: jobs, notebooks and queries. Torch is not imported."""

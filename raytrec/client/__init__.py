"""Runs followed from outside the cluster: jobs, notebooks and queries. No torch."""

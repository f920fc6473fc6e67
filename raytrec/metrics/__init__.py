"""Metrics of training and evaluation: definitions (builtin/) and aggregation over rows and ranks."""

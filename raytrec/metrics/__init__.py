"""Metrics for training and evaluation: their definitions (builtin/) and their aggregation over ranks."""

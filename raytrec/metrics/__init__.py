"""Metrics of training and evaluation: their definitions (builtin/) and their aggregation over ranks."""

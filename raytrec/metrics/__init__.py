"""Metrics of training and evaluations: what they are (builtin/), and how rows of all ranks become figures."""

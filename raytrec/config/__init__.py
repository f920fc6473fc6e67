"""Configuration and schema of a run. Does not import torch."""

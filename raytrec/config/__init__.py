"""Configuration and schema of a run. Torch is not imported."""

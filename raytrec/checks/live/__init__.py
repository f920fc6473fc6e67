"""Live checks, which are evaluated during training."""

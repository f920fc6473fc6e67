"""Live checks, one file each, which are evaluated during training."""

"""Live checks, which are evaluated during training; one file per check."""

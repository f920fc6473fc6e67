"""Live checks: one file each, run while training runs."""

"""Compare services with checkpoints, for `raytrec verify`."""

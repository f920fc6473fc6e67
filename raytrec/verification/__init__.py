"""`raytrec verify`: comparison of services with checkpoints."""

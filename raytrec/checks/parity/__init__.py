"""Parity: comparison of a sharded run with an independent single-process reference."""

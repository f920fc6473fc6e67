"""Parity: a sharded run against an independent single-process reference."""

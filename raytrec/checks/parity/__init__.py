"""Compare a sharded run with an independent single-process reference."""

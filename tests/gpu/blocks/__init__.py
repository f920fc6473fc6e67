"""Blocks of `make gpu-check`, in order. Each module defines run(here), which asserts or raises an error."""

# Module in this folder (or a dotted module path) → time limit in seconds. docs/gpu.md describes the blocks.
BLOCK_TIMEOUTS_S = {
    "environment": 60,
    "collectives": 90,
    "parts": 90,
    "parity": 240,
    "train": 240,
    "resume": 300,
    "adam": 60,
    "not_finite": 240,
    "syncs": 120,
    "phases": 60,
    "hang": 240,
    "uvm": 90,
    "speed": 300,
    "features": 300,
    "figures": 60,
}

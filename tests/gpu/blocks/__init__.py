"""Blocks of `make gpu-check`, in order. Each module defines run(here), which asserts or raises an error."""

# Module in this folder (or a dotted module path) → time limit in seconds; the comments name what a block tests.
BLOCK_TIMEOUTS_S = {
    "environment": 60,  # versions of packages and driver
    "collectives": 90,  # results of NCCL and gloo on loopback
    "parts": 90,  # live checks, initial values and checkpoints
    "parity": 240,  # results against plain torch
    "train": 240,  # AUC against a CPU run
    "resume": 300,  # resumed runs, and checkpoints between GPU and CPU
    "adam": 60,  # evaluations between steps, which must change no table
    "not_finite": 240,  # runs that stop at a NaN before they save
    "syncs": 120,  # raytrec's code, which must not wait for the GPU
    "phases": 60,  # sums of phase times
    "hang": 240,  # recovery from a stuck and a killed rank
    "uvm": 90,  # tables in host memory
    "speed": 300,  # speed of tf32, idle time and reading
    "features": 300,  # managed ids, averages and compilation
    "figures": 60,  # GPU load and memory in the records of `train`
}

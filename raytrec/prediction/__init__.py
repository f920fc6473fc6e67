"""Implementation of `raytrec predict`, which scores rows and writes files of predictions."""

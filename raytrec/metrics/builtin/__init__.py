"""raytrec's own metrics. A new one is a class with @metric in a file of this folder, and nothing else."""

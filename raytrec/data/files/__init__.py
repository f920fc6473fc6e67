"""List the files of a dataset, parse their folders and footers, and compute their fingerprints."""

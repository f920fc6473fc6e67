"""Files of a dataset: listing, partitions, footers and fingerprints."""

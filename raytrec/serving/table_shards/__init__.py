"""Table shards: actors that hold the rows of an export, which replicas look up over Arrow Flight."""

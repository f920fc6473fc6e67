"""Table shards: actors that hold the rows of exports. Replicas look up the rows over Arrow Flight."""

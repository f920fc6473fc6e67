"""Tables apart from the replicas that score: shards hold rows, and replicas look them up over Arrow Flight."""

"""Items found for queries by the dot product of their vectors: an index's folder, exactly and with faiss."""

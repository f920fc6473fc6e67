"""Driver of a run, which opens the data, starts Ray and the workers, and records the result."""

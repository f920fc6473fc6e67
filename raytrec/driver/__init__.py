"""Driver side of a run: data, Ray, worker group and result."""

"""Driver side of a run: data, Ray, the worker group, the result."""

"""A run on the driver's side: data, Ray, the worker group, the result."""

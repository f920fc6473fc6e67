"""The sharding plan: constraints, costs and the search."""

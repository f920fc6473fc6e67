"""Placement of tables on ranks, and the predicted memory and step time of a plan."""

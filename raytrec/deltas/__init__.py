"""Deltas: the rows, ids and dense weights that a run has changed since its previous delta."""

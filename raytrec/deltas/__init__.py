"""Deltas of a run: table rows and managed ids that have changed since the previous delta, and all dense weights."""

"""Managed ids: rows that ids of any kind get while a table is trained, and give back."""

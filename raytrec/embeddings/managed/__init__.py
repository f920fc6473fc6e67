"""Managed ids: rows that ids get and give back."""

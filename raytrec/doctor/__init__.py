"""Checks of an installation and its machines."""

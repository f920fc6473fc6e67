"""The doctor of an installation and its machines."""

"""A run folder as figures and one page."""

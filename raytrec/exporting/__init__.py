"""Export of trained models, and comparison of exports with their runs."""

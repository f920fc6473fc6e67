"""Export trained models, and compare exports with their runs."""

"""The run folder: written, read, and delivered to MLflow."""

"""The run folder: written, read as typed messages, and delivered to MLflow."""

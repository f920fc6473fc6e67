"""Writing and reading run folders, and their delivery to MLflow."""

"""Writing and reading run folders, and delivering them to MLflow."""

"""Write and read run folders, and deliver them to MLflow."""

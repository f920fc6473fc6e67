"""From the run folder to MLflow and Ray's dashboard."""

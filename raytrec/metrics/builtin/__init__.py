"""Built-in metrics. To add a metric, define a class with @metric in a file in this folder."""

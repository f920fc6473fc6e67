"""Built-in metrics. To add a metric, define a class with @metric in a file of this folder."""

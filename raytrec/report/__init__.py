"""Report of a run: findings, figures and a web page."""

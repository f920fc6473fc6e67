"""Reports on runs: findings, plots and web pages."""

"""Reports on runs: findings, figures and web pages."""

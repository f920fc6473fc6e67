"""What every room may use: errors, storage, texts and times."""

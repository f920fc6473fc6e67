"""From Parquet to batches. No torch up to collate.py."""

"""From Parquet to batches. Torch from assemble.py on."""

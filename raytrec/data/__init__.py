"""Read Parquet files into batches. Only assembler.py, batch.py and stream.py import torch."""

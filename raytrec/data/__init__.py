"""Reading of Parquet files into batches. Only assemble.py, batch.py and stream.py import torch."""

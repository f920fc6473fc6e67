"""Read Parquet files into batches. Only assembler.py, batch.py, row_exchange.py and stream.py import torch."""

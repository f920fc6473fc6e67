"""Schema proposals from Parquet files for `raytrec inspect`."""

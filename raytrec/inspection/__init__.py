"""`raytrec inspect`: a schema proposed from Parquet files."""

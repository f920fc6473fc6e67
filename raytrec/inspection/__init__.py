"""`raytrec inspect`, which proposes a schema from Parquet files."""

"""`raytrec predict`: the scores of every row of a folder of Parquet, as Parquet."""

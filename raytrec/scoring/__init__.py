"""Score rows with exported models. This package requires neither Ray, TorchRec, FBGEMM nor MLflow."""

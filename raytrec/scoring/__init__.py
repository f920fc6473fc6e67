"""Score rows with exported models. Requires neither Ray, TorchRec, FBGEMM nor MLflow."""

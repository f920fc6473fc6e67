"""An exported model, scored without the trainer: no Ray, TorchRec, FBGEMM or MLflow."""

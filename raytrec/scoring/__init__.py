"""Scoring with exported models, without the trainer: Ray, TorchRec, FBGEMM and MLflow are not needed."""

"""`raytrec export`: a trained model as a folder that is scored without the trainer."""

"""`raytrec export`: exports of trained models, written and compared with the run."""

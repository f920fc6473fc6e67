"""`raytrec export`: writing exports of trained models and comparing them with their runs."""

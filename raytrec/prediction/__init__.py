"""`raytrec predict`: scoring rows and writing files of predictions."""

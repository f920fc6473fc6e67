"""Score rows and write files of predictions, for `raytrec predict`."""

"""Running raytrec somewhere else: as a job of a cluster, or from a notebook. Needs no torch here."""

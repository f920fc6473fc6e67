"""Running raytrec somewhere else: as a job of a Ray cluster, or from a notebook. Needs neither torch nor torchrec."""

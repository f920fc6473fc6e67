"""Running raytrec somewhere else: as a job of a cluster, or from a notebook. Without torch or torchrec here."""

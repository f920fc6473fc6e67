"""raytrec: a Ray-orchestrated distributed trainer for recommender models.

The sharded run computes what one process would have computed, on any number of workers.
"""

__version__ = "0.1.0"

"""raytrec: a Ray-orchestrated distributed trainer for recommender models.

The sharded run computes what one process would have computed, on any number of workers.

    import raytrec
    result = raytrec.train("jobs/synthetic.yaml", ["train.epochs=2"])
    print(result.metrics["eval.auc"])

Importing this needs neither torch nor Ray; the names below load what they need when they are first used.
"""

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "raytrec.remote.cluster",
    "check": "raytrec.train.check",
    "evaluate": "raytrec.train.driver",
    "Result": "raytrec.train.driver",
    "RunConfig": "raytrec.config",
    "Schema": "raytrec.schema",
    "RaytrecError": "raytrec.errors",
}
__all__ = [*_HOMES, "train"]


def __getattr__(name: str):
    from importlib import import_module

    if name == "train":  # the package raytrec.train is itself callable: see its __init__.py
        return import_module("raytrec.train")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'raytrec' has no attribute '{name}'")

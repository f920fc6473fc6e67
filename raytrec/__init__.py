"""raytrec: a Ray-orchestrated distributed trainer for recommender models.

A sharded run on any number of workers computes the same results as a single process, up to rounding.

    import raytrec
    result = raytrec.train("jobs/synthetic.yaml", ["train.epochs=2"])
    print(result.metrics["eval.auc"])

Importing this package needs neither torch nor Ray. Each name in `__all__` imports its module when it is accessed.
"""

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "raytrec.client.run",
    "train": "raytrec.driver.run",
    "check": "raytrec.driver.check",
    "evaluate": "raytrec.driver.evaluation",
    "predict": "raytrec.prediction.predict",
    "index": "raytrec.retrieval.build",
    "load_index": "raytrec.retrieval.index",
    "export": "raytrec.exporting.export",
    "load": "raytrec.scoring.load",
    "tune": "raytrec.tuning.tune",
    "Result": "raytrec.driver.console",
    "RunConfig": "raytrec.config.run_config",
    "Schema": "raytrec.config.schema",
    "RaytrecError": "raytrec.common.errors",
}
__all__ = [*_HOMES]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str):
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'raytrec' has no attribute '{name}'")

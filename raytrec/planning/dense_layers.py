"""The work of a configuration's dense layers, counted without a GPU and without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raytrec.config.features import Features, resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema

if TYPE_CHECKING:
    import torch

    from raytrec.planning.dense_work import Counter, DenseWork

BuildModel = Callable[[RunConfig, Schema, "torch.device"], Any]  # of worker.build.unsharded


def count_dense_layers(build: BuildModel, config: RunConfig, schema: Schema, rows: int) -> DenseWork:
    """What the dense layers, losses and their backward are for so many rows of a rank.

    Losses that compare the rows of a global batch are counted for this rank's rows alone.

    Args:
        build: Builds a rank's model (worker.build.unsharded).
        rows: Rows of the rank's batch.

    Raises:
        ConfigError: a model that cannot be built from this schema.
    """
    import torch

    from raytrec.checks.parity.batches import local_batch, random_batches
    from raytrec.compat.torch_ import quiet_tracing
    from raytrec.planning.dense_work import count_dense_work
    from raytrec.tasks.task import resolve_tasks

    quiet_tracing()
    features, tasks = resolve_features(schema, config.model), resolve_tasks(config.tasks, schema)

    def run(device: torch.device, count: int, counter: Counter) -> list[torch.Tensor]:
        head = build(config, schema, torch.device("cpu")).head.to(device)
        (whole,) = random_batches(schema, count, 1, seed=0, tasks=tasks)
        here = local_batch(whole, schema, [0, count], 0, features)
        batch = here.to(device)
        batch.lengths = here.lengths
        found = {name: _vectors(name, schema, features, count, device) for name in schema.sparse}
        with counter:
            loss, _ = head(found, batch)
            counter.keep()
            loss.backward()
        return list(head.parameters())

    return count_dense_work(run, rows)


def _vectors(name: str, schema: Schema, features: Features, rows: int, device: torch.device) -> torch.Tensor:
    """What is looked up of a feature."""
    import torch

    dim, length = schema.tables[schema.sparse[name].table].dim, features.sequences.get(name)
    shape = (rows, length, dim) if length else (rows, dim)
    return torch.zeros(shape, device=device, requires_grad=True)

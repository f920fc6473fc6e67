"""Hand-written trainers with which `benchmarks/step.py` compares raytrec.

    python benchmarks/step_sides.py limit|by_hand|ray_recipe SETTINGS.json

Each trainer uses raytrec's dense model and optimizers, TorchRec's planner, DistributedModelParallel and
TrainPipelineSparseDist, one thread per rank, and the mean of the local losses:

limit       batches in memory, read before the first step: the upper bound for any trainer
by_hand     a torch DataLoader with one reading process per rank, which reads row groups with pyarrow
ray_recipe  Ray's TorchTrainer with get_dataset_shard, iter_torch_batches and a NumPy collate function

SETTINGS.json contains the fields of Settings. After the first step and every twentieth step, rank 0 appends a
line with the number of the step and the time to the file `steps`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path
from time import time
from typing import Any

EVERY = 20  # number of steps between two lines; equals the default of train.log_every_steps
WARM_UP = 3 * EVERY  # number of steps before the measured steps
IN_MEMORY = 64  # number of batches of the side `limit`: 70 MB, more than fits into any cache


@dataclass
class Settings:
    """Settings of one run of a side.

    Attributes:
        data: Folder of Parquet files, with schema.yaml in the folder above.
        model: Section `model` of a configuration.
        workers: Number of ranks.
        batch: Number of rows in a rank's batch.
        total: Number of steps.
        steps: File to which the times of steps are written.
    """

    data: str
    model: dict[str, Any]
    workers: int
    batch: int
    total: int
    steps: str

    @classmethod
    def load(cls, path: str) -> Settings:
        """Read the settings from a JSON file."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    @property
    def schema(self) -> Any:
        """Return the schema of the data."""
        from raytrec.config.schema import Schema

        return Schema.load(str(Path(self.data).parent / "schema.yaml"))


def train(settings: Settings, batches: Iterator[Any], rank: int) -> None:
    """Run the training loop of TorchRec's examples, and record the time every EVERY steps."""
    pipeline = build(settings)
    with open(settings.steps, "a", encoding="utf-8") as file:
        for step in range(1, settings.total + 1):
            pipeline.progress(batches)
            if rank == 0 and (step == 1 or step % EVERY == 0):
                file.write(json.dumps({"step": step, "unix_s": time()}) + "\n")
                file.flush()


def build(settings: Settings) -> Any:
    """Return a training pipeline as in TorchRec's examples.

    This is a collective operation: every rank must call it.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from raytrec.compat.torch_ import apply_optimizer_in_backward
    from raytrec.config.run_config import RunConfig
    from raytrec.models import build_model

    schema, device = settings.schema, torch.device("cpu")
    config = RunConfig.model_validate({"data": {"train": "unused/train"}, "model": settings.model})
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            tables = [
                EmbeddingBagConfig(
                    name=spec.table,
                    embedding_dim=schema.tables[spec.table].dim,
                    num_embeddings=schema.tables[spec.table].rows,
                    feature_names=[feature],
                    pooling=PoolingType.MEAN if spec.pooling == "mean" else PoolingType.SUM,
                )
                for feature, spec in schema.sparse.items()
            ]
            self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
            self.dense = build_model(schema, config.model)

        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            logits_B = self.dense(batch.dense, self.bags(batch.sparse).to_dict())
            loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)
            return loss, logits_B.detach()

    model, tables, dense = Model(), config.optim.embeddings, config.optim.dense
    apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": tables.lr, "eps": tables.eps})
    world = dist.get_world_size()
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    sharder = EmbeddingBagCollectionSharder()
    # Otherwise small tables become data-parallel, with a dense gradient and update, which is slower here.
    fused = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in schema.tables}
    planner = EmbeddingShardingPlanner(topology, settings.batch, constraints=fused)
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    rest = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=dense.lr, eps=dense.eps),
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, rest])
    sharded.train()
    return TrainPipelineSparseDist(sharded, optimizer, device, execute_all_batches=True)


def read_batches(settings: Settings, rank: int) -> Iterator[Any]:
    """Yield batches from a rank's row groups endlessly, in a new order each epoch.

    The columns are converted without a copy and then concatenated into one KeyedJaggedTensor.
    """
    import numpy as np
    import pyarrow.parquet as pq

    schema = settings.schema
    files = [pq.ParquetFile(path) for path in sorted(Path(settings.data).glob("*.parquet"))]
    groups = [(file, index) for file in files for index in range(file.num_row_groups)]
    rng = np.random.default_rng(0)
    while True:
        rng.shuffle(groups)
        for file, index in groups[rank :: settings.workers]:
            table = file.read_row_group(index, columns=schema.columns, use_threads=False).combine_chunks()
            for start in range(0, len(table) - settings.batch + 1, settings.batch):
                yield collate(table.slice(start, settings.batch), schema)


def collate(table: Any, schema: Any) -> Any:
    """Return a batch with the rows of an Arrow table."""
    import numpy as np
    import pyarrow as pa
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    def column(name: str) -> Any:
        return table[name].chunk(0)

    values, lengths = [], []
    for feature in schema.sparse:
        ids = column(schema.get_ids_column(feature))
        if pa.types.is_list(ids.type):
            lengths.append(np.diff(ids.offsets.to_numpy()))
            ids = ids.flatten()
        else:
            lengths.append(np.ones(len(ids), np.int32))
        values.append(ids.to_numpy())
    sparse = KeyedJaggedTensor(
        list(schema.sparse), torch.from_numpy(np.concatenate(values)), lengths=torch.from_numpy(np.concatenate(lengths))
    )
    dense = np.stack([column(name).to_numpy() for name in schema.dense], axis=1)
    labels = column(schema.labels[0]).to_numpy().astype(np.float32)
    return batch_of(torch.from_numpy(dense), sparse, torch.from_numpy(labels))


def batch_of(dense: Any, sparse: Any, labels: Any) -> Any:
    """Return a batch for TorchRec's pipeline."""
    import step_batch

    return step_batch.Batch(dense, sparse, labels)


def limit(settings: Settings, rank: int) -> None:
    """Train on batches that were read into memory before the first step."""
    train(settings, cycle(list(islice(read_batches(settings, rank), IN_MEMORY))), rank)


def by_hand(settings: Settings, rank: int) -> None:
    """Train on batches from a torch DataLoader with one reading process."""
    from torch.utils.data import DataLoader, IterableDataset

    class Rows(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return read_batches(settings, rank)

    train(settings, iter(DataLoader(Rows(), batch_size=None, num_workers=1)), rank)


def ray_recipe(settings: Settings) -> None:
    """Run Ray Train on a local Ray cluster, as shown in Ray's documentation."""
    import ray.data
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    from raytrec.cluster.session import ray_session

    with ray_session(num_cpus=2 * settings.workers + 1):
        TorchTrainer(
            train_on_ray,
            train_loop_config=settings,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=settings.workers),
            run_config=ray.train.RunConfig(storage_path=str(Path(settings.steps).parent / "ray")),
            datasets={"train": ray.data.read_parquet(settings.data, columns=settings.schema.columns)},
        ).fit()


def train_on_ray(settings: Settings) -> None:
    """Train on a rank of Ray Train, with batches from the shard's iter_torch_batches."""
    import ray.train
    import torch
    from ingest import collate_numpy

    schema, shard = settings.schema, ray.train.get_dataset_shard("train")
    torch.set_num_threads(1)

    def collate(batch: Any) -> Any:
        return batch_of(*collate_numpy(schema, batch))

    def batches() -> Iterator[Any]:
        while True:
            yield from shard.iter_torch_batches(batch_size=settings.batch, collate_fn=collate, drop_last=True)

    train(settings, batches(), ray.train.get_context().get_world_rank())


def join(settings: Settings, rank: int) -> None:
    """Make this process a rank of a group on this machine."""
    import torch
    import torch.distributed as dist

    os.environ["LOCAL_WORLD_SIZE"] = str(settings.workers)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings.steps}.store",
        rank=rank,
        world_size=settings.workers,
        timeout=timedelta(seconds=120),
    )


def main(side: str, path: str, rank: str | None = None) -> None:
    """Run a side as Ray's driver, as a rank, or as the process that starts the ranks, like torchrun."""
    settings = Settings.load(path)
    if side == "ray_recipe":
        return ray_recipe(settings)
    if rank is not None:
        join(settings, int(rank))
        return {"limit": limit, "by_hand": by_hand}[side](settings, int(rank))
    command = [sys.executable, "-W", "ignore", __file__, side, path]
    ranks = [subprocess.Popen([*command, str(number)]) for number in range(settings.workers)]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    import step_sides

    step_sides.main(*sys.argv[1:])  # Ray's workers import the module's classes by this name

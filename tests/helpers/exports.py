"""Checkpoints of small models and their Parquet data for export tests, made on one rank without Ray."""

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
import small
import torch
import yaml
from checkpoints import progress_values
from ranks import run_on_ranks
from test_models import ModelCase

import raytrec
from raytrec.driver.track import track

ROWS = 12


CUSTOM_MODELS_SOURCE = """
import torch
from torch import nn

class Sum(nn.Module):
    def __init__(self, schema, config):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, dense, pooled):
        return self.layer(pooled["user"] + pooled["tags"]).squeeze(1)

class Branches(Sum):
    def forward(self, dense, pooled):
        if pooled["user"].sum() > 0:
            return super().forward(dense, pooled)
        return super().forward(dense, pooled) * 2
"""


@dataclass(frozen=True)
class SmallModelCase:
    """Model on the schema of tests/helpers/small.py.

    Args:
        model: values of the model section.
        dense: if True, the schema has dense columns.
        train: values of the train section.
    """

    model: dict
    dense: bool = True
    train: dict = field(default_factory=dict)

    def schema(self):
        return small.make_small_schema(**({} if self.dense else {"dense": []}))

    def config(self):
        return small.make_small_config(1, {"sharding_type": "table_wise"}, model=self.model, **self.train)


def batch_to_table(batch, schema):
    """Convert a GlobalBatch to an Arrow table with list columns."""
    columns = {name: pa.array(batch.labels[:, i].numpy()) for i, name in enumerate(schema.labels)}
    columns |= {name: pa.array(batch.dense[:, i].numpy()) for i, name in enumerate(schema.dense)}
    for feature, spec in schema.sparse.items():
        ids, of, weights = batch.bags[feature]
        ends = torch.bincount(of, minlength=len(batch)).cumsum(0)
        offsets = pa.array([0, *ends.tolist()], pa.int32())

        def lists(values, offsets=offsets):
            return pa.ListArray.from_arrays(offsets, pa.array(values.numpy()))

        columns[schema.get_ids_column(feature)] = lists(ids)
        if spec.weights:
            columns[spec.weights] = lists(weights)
        for number, side in enumerate(spec.side_features):
            columns[side] = lists(batch.side_features[feature][:, number])
    return pa.table(columns)


def _saved(rank, world, case, root):
    """Train for two steps, save, and evaluate a third batch.

    Return (evaluated batch, checkpoint folder, task → predictions, tower → vectors).
    """
    from raytrec.checkpoint.restore import gather_ids
    from raytrec.checkpoint.save import CheckpointWriter
    from raytrec.checkpoint.state import LogicalState
    from raytrec.checks.parity.batches import compute_row_bounds, make_local_batch, make_random_batches
    from raytrec.config.features import resolve_features
    from raytrec.config.run_config import load_config
    from raytrec.tasks.objective import Objective
    from raytrec.worker.build import build_step

    schema, values = case.schema(), case.config().model_dump(by_alias=True, mode="json")
    values["data"] |= {"train": f"{root}/data", "valid": None, "test": None}
    values["run"]["name"] = "small"
    config = load_config(values)
    features, tasks = resolve_features(schema, config.model), Objective.of(config, schema).tasks
    whole = make_random_batches(schema, ROWS, 3, seed=1, tasks=tasks)
    local = [make_local_batch(batch, schema, compute_row_bounds(ROWS, 1, "equal"), 0, features) for batch in whole]
    step, _ = build_step(config, schema, torch.device("cpu"))
    list(step.train(iter(local[:2]), 2))
    (outputs,) = step.evaluate(iter(local[2:]))
    towers = ("query", "item") if config.model.retrieves else ()
    vectors = {tower: next(step.evaluate(iter(local[2:]), tower)).vectors for tower in towers}
    saver = CheckpointWriter(f"{root}/checkpoints", config.checkpoint)
    about = {"config": values, "schema": schema.to_yaml(), "data": "", "progress": progress_values(2)}
    ids, about_ids = gather_ids(step.maps)
    saver.save(2, LogicalState(step.model, step.optimizer).tensors(), about | about_ids, ids)
    folder = saver.collect_outcome().folder
    saver.close()
    return whole[2], folder, {task: o.predictions for task, o in outputs.tasks.items()}, vectors


def train_for_export(case, root):
    """Train the model of a test_models.ModelCase for two steps.

    Returns:
        (checkpoint folder, rows as a table, task → predictions of these rows, tower → vectors).
    """
    ((batch, folder, predictions, vectors),) = run_on_ranks(1, _saved, case, str(root))
    table = batch_to_table(batch, case.schema())
    (root / "data").mkdir()
    pq.write_table(table, root / "data/rows.parquet")
    return folder, table, predictions, vectors


def train_tracked_run(model, folder):
    """Train a model of test_models.CASES and track its run in the store sqlite:///FOLDER/mlflow.db.

    Returns:
        (rows as a table, task → predictions of these rows).
    """
    folder.mkdir()
    _, table, predictions, _ = train_for_export(ModelCase(model, (1, 1)), folder)
    values = {
        "run": {"name": "small", "dir": str(folder)},
        "data": {"train": f"{folder}/data"},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db", "experiment": "films"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    track(folder)
    return table, predictions


def score_with_onnx_and_torch(export, rows):
    """Return the scores of rows computed with onnxruntime and with torch, as two lists of arrays.

    Args:
        export: export folder with model.onnx.
        rows: table of rows.
    """
    import onnxruntime

    model, given = raytrec.load(export), []
    program = model._programs["predict"].forward
    model._programs["predict"].forward = lambda *tensors: given.append(tensors) or program(*tensors)
    expected = model.score([model.reader.read(rows)])
    session = onnxruntime.InferenceSession(export / "model.onnx")
    names = [each.name for each in session.get_inputs()]
    values = {name: tensor.numpy() for name, tensor in zip(names, *given, strict=True)}
    return session.run([task.column for task in model.manifest.tasks], values), expected

"""Evaluation of fixed rows on real ranks, without a model and without files."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from ranks import run_on_ranks
from small import SCHEMA

from raytrec.config.tasks import EvalSection, TaskSection
from raytrec.metrics.builtin.ranking import AUC
from raytrec.metrics.registry import RankedMetric, metric
from raytrec.metrics.selection import Selection
from raytrec.tasks.outputs import StepOutputs, TaskOutputs
from raytrec.tasks.task import key_columns, resolve_tasks

PARTS = {1: [1.0], 2: [0.3, 1.0], 3: [0.2, 0.2, 1.0]}  # cumulative shares of rows; one rank has no rows
BATCHES = 4


@metric("auc_of_user", title="AUC", label="AUC", better="higher")
class UnboundedAUC(RankedMetric):
    """Metric of a user, who has not defined an error bound."""

    sums, figure = staticmethod(AUC.sums), staticmethod(AUC.figure)


@dataclass(frozen=True)
class Case:
    """Rows of one task, as float32 and int64 tensors [N], with the evaluation settings."""

    logits: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    metrics: list
    groups: torch.Tensor | None = None
    items: torch.Tensor | None = None
    loss: str = "bce"
    settings: dict = field(default_factory=dict)
    texts: list | None = None  # values of the slice column `group`


def make_selection(case):
    (task,) = resolve_tasks([TaskSection(label="y", loss=case.loss, metrics=[])], SCHEMA)
    group = None if case.groups is None else "group"
    item = None if case.items is None else "item"
    outputs = case.logits.shape[1] if case.logits.dim() == 2 else 1
    changed = replace(task, group=group, item=item, metrics=tuple(case.metrics), outputs=outputs)
    return Selection([changed], EvalSection(**case.settings))


class Step:
    """Stand-in for a worker's step that returns fixed predictions."""

    def __init__(self, task, device):
        self._task, self._device = task, device

    def evaluate(self, batches):
        for batch in batches:
            parts = [x.to(self._device) for x in (batch.logits, batch.labels[:, 0], batch.task_weights[:, 0])]
            logits, labels, weights = parts
            keys = {name: batch.keys[:, i].to(self._device) for i, name in enumerate(batch.columns)}
            outputs = TaskOutputs(logits, self._task.loss.predict(logits), labels, weights, keys)
            yield StepOutputs({"y": outputs}, batch.weights.to(self._device), torch.zeros(()))


def batches(case, task, rank, world):
    """Yield this rank's rows in BATCHES batches, each with padding rows."""
    import pyarrow as pa

    ends = [0, *(round(len(case.labels) * share) for share in PARTS[world])]
    mine = torch.arange(ends[rank], ends[rank + 1])
    columns = key_columns([task], case.settings.get("slices", []))
    values = {"group": case.groups, "item": case.items}
    for rows in mine.tensor_split(BATCHES):
        padded = torch.cat([rows, rows.new_zeros(2)])
        there = (torch.arange(len(padded)) < len(rows)).float()
        keys = [values[name][padded] for name in columns]
        reserved = pa.table({"group": [case.texts[i] for i in rows]}) if case.texts else None
        yield SimpleNamespace(
            logits=case.logits[padded],
            labels=case.labels[padded].unsqueeze(1),
            weights=there,
            task_weights=(case.weights[padded] * there).unsqueeze(1),
            keys=torch.stack(keys, 1) if keys else torch.empty(len(padded), 0),
            columns=columns,
            reserved=reserved,
        )


def evaluate_on_rank(rank, world, cases):
    """Return [(figures, curves)] of the cases on this rank."""
    import torch.distributed as dist

    from raytrec.worker.evaluate import evaluate

    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    found = []
    for case in cases:
        selection = make_selection(case)
        task = selection.tasks["y"]
        stream = SimpleNamespace(
            batches=lambda case=case, task=task: batches(case, task, rank, world),
            may_skip=False,
            dataset=SimpleNamespace(rows=len(case.labels), uri="here"),
        )
        found.append(evaluate(Step(task, device), stream, device, selection))
    return found


def evaluations(world, cases, **options):
    """Return [(figures, curves)] of the cases for each rank."""
    return run_on_ranks(world, evaluate_on_rank, cases, **options)

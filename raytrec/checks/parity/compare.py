"""Compare a sharded run with a single process (reference.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import isnan
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingPlan

from raytrec.checks.parity import reference
from raytrec.checks.parity.batches import GlobalBatch, compute_row_bounds, make_random_batches
from raytrec.checks.parity.reference import Reference, TableReference
from raytrec.checks.parity.sharded import ShardedRun
from raytrec.common.formatting import null_nonfinite
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.schema_parts import ManagedIds
from raytrec.config.tables import QCommsSection, Schedule, TablePlan
from raytrec.embeddings.constraints import resolve_constraints, resolve_optimizers
from raytrec.embeddings.sharding import describe_plan
from raytrec.models.inputs import Sequence
from raytrec.tasks.task import resolve_tasks

# Largest accepted error, relative to the largest value in the tensor. With fp16 tables, one rounding to 11 bits
# per step, to either neighbor, is accepted; see _compare_steps.
LIMITS = {
    "fp32": {"forward": 1e-6, "gradient": 1e-5, "weights": 1e-4, "state": 1e-4},
    "fp16": {"forward": 1e-6, "gradient": 1e-3, "weights": 1e-3, "state": 1e-4},
}
# The gradient is derived from an SGD step. The learning rate is a large power of two: the step exceeds the
# weight by so much that no digit of the gradient is lost, and division by the rate is exact. Gradients of dense
# layers can be small relative to their weights (1e-7 versus 0.1 in an attention over untrained embeddings), so
# their rate is larger. The rate of tables is limited by fp16, whose maximum is 65504.
GRADIENT_LR = 2.0**10
DENSE_GRADIENT_LR = 2.0**20
CANDIDATES = 8  # candidate batches per step; the batch farthest from an activation's kink is used

MAX_SHRUNK_ROWS = 199  # rows of a table; a prime, so that no number of ranks divides it
# Adam and Adagrad divide by the root of the second moment. If larger terms cancel in a gradient (as for the key
# bias of an attention), only their rounding remains, about 1e-9, and the first step is this rounding ÷ eps. A
# larger eps makes that step negligible.
MIN_SHRUNK_EPS = 1e-5


@dataclass(frozen=True)
class Finding:
    """Result of one comparison.

    Attributes:
        check: forward, gradient, weights or state.
        name: Feature, table or dense parameter; TABLE.KIND for optimizer state.
        error: max |sharded − reference| ÷ max |reference|; NaN if a value is NaN. For weights, the divisor is at least
            the bound of `_measure_sizes`; for gradients, at least the magnitude of any row's contribution.
        absolute: max |sharded − reference|.
        limit: Largest accepted `error`.
    """

    check: str
    name: str
    error: float
    absolute: float
    limit: float

    def record(self) -> dict:
        """Return the attributes and the key passed (error ≤ limit) as JSON values; NaN and infinity become None."""
        return null_nonfinite(asdict(self) | {"passed": self.error <= self.limit})


def shrink(config: RunConfig, schema: Schema, plan: ShardingPlan) -> tuple[RunConfig, Schema]:
    """Return copies of a configuration and schema with at most 199 rows per table and an eps of at least 1e-5.

    An eps of 0, or that is not set, is unchanged, as are features, dims and dtypes. The configuration requires the
    sharding types, ranks and kernels of `plan`, without plan.colocate. Managed ids get default settings, with which a
    new id gets a row immediately.
    """
    config, schema = config.model_copy(deep=True), schema.model_copy(deep=True)
    constraints = resolve_constraints(config, schema)
    for table in schema.tables.values():
        table.rows, table.ids = min(table.rows, MAX_SHRUNK_ROWS), table.ids and ManagedIds()
    optims: list[Any] = [config.optim.embeddings, config.optim.dense, *config.optim.tables.values()]
    for optim in optims:
        optim.eps = optim.eps and max(optim.eps, MIN_SHRUNK_EPS)
    config.plan.colocate = []
    config.plan.tables = {
        entry["table"]: TablePlan(
            sharding_type=entry["sharding_type"],
            ranks=None if entry["sharding_type"] in ("row_wise", "data_parallel") else entry["ranks"],
            compute_kernel=entry["compute_kernel"],
            dtype=constraints[entry["table"]].dtype,
        )
        for entry in describe_plan(plan)
    }
    return config, schema


def compare(
    build: Callable,
    config: RunConfig,
    schema: Schema,
    device: torch.device,
    *,
    rows: int = 24,
    steps: int = 20,
    balance: str = "unequal",
    seed: int = 0,
) -> list[Finding]:
    """Compare a sharded run with a single process: pooled embeddings, gradients, and the state after `steps` steps.

    This is a collective operation: every rank must call it.

    Args:
        build: Function that builds the training step: worker.build.build_step.
        config: Configuration whose plan, optimizers, clipping and tasks are checked. The comparison uses fp32
            regardless of train.matmul and plan.qcomms, because a lower precision would hide errors.
        schema: Schema with tables small enough for one process.
        device: Device of this rank.
        rows: Number of rows in a global batch.
        steps: Number of steps.
        balance: Distribution of rows over ranks; see `batches.compute_row_bounds`.
        seed: Seed for the batches.

    Returns:
        Findings about features, tables, dense parameters and optimizer state on rank 0; [] on other ranks. Of weights
        and state that are compared after several steps, the finding with the largest error is returned.

    Raises:
        RunError: On rank 0, a loss has no reference definition; see `losses.compute_loss`.
    """
    config = config.model_copy(deep=True)
    config.train.matmul, config.plan.qcomms = "fp32", QCommsSection()
    bounds = compute_row_bounds(rows, dist.get_world_size(), balance)
    tasks = resolve_tasks(config.tasks, schema)
    choices = [make_random_batches(schema, rows, CANDIDATES, seed * steps + step, tasks) for step in range(steps)]
    shard = partial(ShardedRun, build, schema=schema, device=device, bounds=bounds)
    return _compare_gradient(shard, config, choices[0]) + _compare_steps(shard, config, choices)


def _choose_smooth_batch(single: Reference | None, choices: list[GlobalBatch]) -> GlobalBatch:
    """Return the batch that is farthest from a kink of the reference's activations.

    This is a collective operation: every rank must call it. `single` is the reference on rank 0, else None.
    """
    best = [0]
    if single:
        margins = [reference.measure_kink_margin(single, batch) for batch in choices]
        best[0] = margins.index(max(margins))
    dist.broadcast_object_list(best)
    return choices[best[0]]


def _compare_gradient(
    shard: Callable[[RunConfig], ShardedRun], config: RunConfig, choices: list[GlobalBatch]
) -> list[Finding]:
    """Compare the pooled embeddings and the unclipped gradient of one batch."""
    config = config.model_copy(deep=True)
    config.optim.embeddings.name = config.optim.dense.name = "sgd"
    config.optim.embeddings.lr, config.optim.dense.lr = GRADIENT_LR, DENSE_GRADIENT_LR
    config.optim.tables, config.optim.embeddings.weight_decay = {}, 0.0
    config.optim.dense.weight_decay, config.train.max_grad_norm = 0.0, None
    config.optim.schedule = Schedule()
    run = shard(config)
    before, single = run.weights(), run.reference()
    batch = _choose_smooth_batch(single, choices)
    pooled = run.pooled(batch)  # must precede training, when the pipeline changes the model
    run.train([batch])
    after = run.weights()
    if dist.get_rank():
        return []
    findings = []
    for feature, expected in single.pooled(batch).items():
        vectors = expected.vectors if isinstance(expected, Sequence) else expected
        table = run.schema.sparse[feature].table
        findings.append(_make_finding(run, "forward", feature, pooled[feature], vectors.detach(), table))
    parameters = run.list_parameters(single)
    sizes = reference.measure_max_row_gradients(single, batch, list(parameters.values()))
    reference.train(single, [batch], [])
    for (name, parameter), size in zip(parameters.items(), sizes, strict=True):
        rate = GRADIENT_LR if name in run.dtypes else DENSE_GRADIENT_LR
        gradient = (before[name].float() - after[name].float()) / rate
        findings.append(_make_finding(run, "gradient", name, gradient, parameter.grad, name, size))
    return findings


def _compare_steps(
    shard: Callable[[RunConfig], ShardedRun], config: RunConfig, choices: list[list[GlobalBatch]]
) -> list[Finding]:
    """Compare weights and optimizer state after all steps, with the optimizers of the configuration.

    If a table is not fp32, every step is compared, and the worst step counts; otherwise, only the last step is. After
    each comparison, the reference copies the sharded run's weights. Without this copy, two correct runs whose gradients
    differ in the last bit could round a weight to different neighbors. Later steps would amplify this difference.
    """
    config = config.model_copy(deep=True)
    config.optim.schedule = config.optim.schedule.resolve_decay_steps(len(choices))
    run = shard(config)
    start, single = run.weights(), run.reference()
    optimizers = _make_optimizers(run, single) if single else {}
    rates = [(group, group["lr"]) for each in optimizers.values() for group in each.param_groups]
    every_step = set(run.dtypes.values()) != {"fp32"}
    worst: dict[tuple[str, str], Finding] = {}
    sizes: dict[str, float] = {}
    ahead = []  # batches that only the reference has trained on
    for number, candidates in enumerate(choices, start=1):
        ahead.append(_choose_smooth_batch(single, candidates))
        if single and number == 1:
            sizes = _measure_sizes(run, single, start, ahead[0])
        for group, rate in rates:
            group["lr"] = rate * config.optim.schedule.compute_factor(number - 1)
        if single:
            clip = config.train.max_grad_norm, config.train.clip_tables
            reference.train(single, ahead[-1:], list(optimizers.values()), *clip)
        if not every_step and number < len(choices):
            continue
        run.train(ahead)
        ahead = []
        weights, state = run.weights(), run.state()
        if single:
            findings = [
                _make_finding(run, "weights", name, weights[name], parameter.detach(), name, sizes[name])
                for name, parameter in run.list_parameters(single).items()
            ]
            for table, kinds in state.items():
                expected = optimizers[table].state[single.tables[table]]
                for kind, values in kinds.items():
                    findings.append(_make_finding(run, "state", f"{table}.{kind}", values, expected[kind], table))
            for finding in findings:
                key = finding.check, finding.name
                worst[key] = max(worst.get(key, finding), finding, key=lambda f: (isnan(f.error), f.error))
            run.copy_weights_to(single)
    return list(worst.values())


def _make_optimizers(run: ShardedRun, single: Reference) -> dict[str, torch.optim.Optimizer]:
    """Return the reference's optimizers: table → the table's optimizer, and '' → the dense parameters' optimizer."""
    sections, dense = resolve_optimizers(run.config, run.schema), run.config.optim.dense
    make = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[dense.name]
    out = {"": make(single.model.parameters(), lr=dense.lr, weight_decay=dense.weight_decay, **dense.settings)}
    for name, kernel in run.kernels.items():
        e, fused = sections[name], kernel != "dense"
        table = single.tables[name]
        out[name] = TableReference(e.name, table, e.lr, e.eps, e.weight_decay, touched_rows=fused)
    return out


def _measure_sizes(
    run: ShardedRun, single: Reference, start: dict[str, torch.Tensor], batch: GlobalBatch
) -> dict[str, float]:
    """Return, by name, a lower bound for the divisor of errors in the weights of each table and dense parameter.

    The bound is the largest initial magnitude. For a dense parameter, it is at least the learning rate × the largest
    contribution of a row of `batch` to the gradient. Otherwise, the divisor could be almost 0 if contributions
    cancel in every step: for example, a loss over pairs does not change a bias that all scores share.
    """
    sizes = {name: float(values.abs().max()) for name, values in start.items()}
    dense = dict(single.model.named_parameters())
    largest = reference.measure_max_row_gradients(single, batch, list(dense.values()))
    rate = run.config.optim.dense.lr
    return sizes | {n: max(sizes[n], rate * value) for n, value in zip(dense, largest, strict=True)}


def _make_finding(
    run: ShardedRun, check: str, name: str, got: torch.Tensor, expected: torch.Tensor, owner: str, size: float = 0.0
) -> Finding:
    """Return the finding that compares a sharded run's tensor, `got`, with the reference's, `expected`.

    `owner` is the tensor's table or dense layer. `size` is the smallest divisor of the error.
    """
    coarsest = "fp16" if "fp16" in run.dtypes.values() else "fp32"
    # The rounding of one table affects all gradients, but in the forward pass only that table's embeddings.
    dtype = run.dtypes.get(owner, coarsest) if check == "forward" else coarsest
    absolute = float((got.double() - expected.double()).abs().max()) if got.numel() else 0.0
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return Finding(check, name, absolute / max(largest, size, 1e-30), absolute, LIMITS[dtype][check])

"""Build and shard a rank's model, and restore or initialize its state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchrec.distributed import comm_ops
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from raytrec.checkpoint.index import find_progress_problem, read_index
from raytrec.checkpoint.restore import load_with_ids, restore
from raytrec.checkpoint.rows import parse_stored_schema, resolve_warm_starts
from raytrec.checkpoint.state import LogicalState, find_nonfinite, is_average, summarize_over_ranks
from raytrec.common import messages
from raytrec.common.collectives import Peers
from raytrec.common.errors import RunError
from raytrec.compat.fbgemm import CACHE_SETTINGS, pad_empty_shards
from raytrec.compat.torchrec_ import substitute_torchrec_kernel, use_custom_lookups
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import CACHING_KERNEL, MMAP_KERNEL, resolve_optimizers
from raytrec.embeddings.managed.batches import ManagedBatches
from raytrec.embeddings.mapped import MappedFileFactory, mark_mapped
from raytrec.embeddings.optim import DenseAverage, GlobalNormClip, combine_optimizers, mark_fused
from raytrec.embeddings.sharding import list_shard_widths, make_codecs, make_planning_sharders, make_sharders
from raytrec.embeddings.tables import fill_tables
from raytrec.models.parts.shared_negatives import share_negatives_across_ranks
from raytrec.models.recommender import build_recommender, checkpoint_activations, compile_dense
from raytrec.planning.memory import compute_rank_parts, exclude_training_memory, list_planned_tables
from raytrec.planning.plan import make_plan
from raytrec.planning.step_cost import estimate_hot_rows
from raytrec.tasks.objective import Objective, add_temperatures
from raytrec.tasks.task import count_logits, needs_vectors
from raytrec.worker.loop import make_train_order
from raytrec.worker.nonfinite import SkipNonfiniteOptimizer
from raytrec.worker.process import prepare_process
from raytrec.worker.step import LossModel, Step

if TYPE_CHECKING:
    from raytrec.worker.context import WorkerContext
    from raytrec.worker.progress import Progress


def build_step(
    config: RunConfig,
    schema: Schema,
    device: torch.device,
    *,
    fill: bool = True,
    steps: int = 0,
    objective: type[Objective] = Objective,
) -> tuple[Step, ShardingPlan]:
    """Build this rank's shards of the model, its optimizer and its training pipeline.

    This is a collective operation: every rank must call it. Initial weights do not depend on the number of ranks:
    every rank draws the same dense weights from run.seed, and the weights of a table are drawn separately for each row.

    Args:
        config: Configuration of the run.
        schema: Schema of the data.
        device: Device of the rank.
        fill: True to initialize the tables; False if the caller initializes or restores them.
        steps: Number of steps in the whole run; 0 if nothing is trained.
        objective: Class that turns the model's logits into losses and outputs.

    Returns:
        The step, and the sharding plan, which is the same on every rank.

    Raises:
        RunError: TorchRec's gradient division is disabled in this process, or a file for a table cannot be created.
        ConfigError: No plan meets the constraints (see `make_plan`), or the tasks do not fit the schema or the model.
        Exception: A user-defined model or loss has raised this error.
    """
    if not comm_ops.get_gradient_division():
        raise RunError(
            "TorchRec's gradient division is disabled in this process",
            where="torchrec.distributed.comm_ops.set_gradient_division(False)",
            expected="gradient division, TorchRec's default, for which raytrec scales its loss",
            do="remove the call set_gradient_division(False), or pass True",
        )
    prepare_process(config.train, bool(schema.managed))
    world = dist.get_world_size()
    model = build_unsharded(config, schema, device, world, objective)
    optimizers = resolve_optimizers(config, schema)
    if config.train.compile:
        rows = make_train_order(config).padded_rows(config.data.global_batch_size, 0, world)
        graph_rows = rows if config.train.compile == "graphs" else None
        compile_dense(model.head.model, model.head.call, device, graph_rows)
    if config.train.activation_checkpointing:
        checkpoint_activations(model.head.model)
    mark_fused(model.embeddings.collections, optimizers, device.type)
    planners = make_planning_sharders(config, schema, world)
    plan = make_plan(model, planners, schema, config, device)
    codecs = make_codecs(config, list_shard_widths(plan), world)
    tables = compute_rank_parts(list_planned_tables(plan, config, schema, world), config, schema, device.type)
    shares = [share for share, _ in estimate_hot_rows(tables, config, schema, world)]
    mark_mapped(model.embeddings.collections, plan, optimizers, any(shares))
    # For tables in host memory with a GPU cache, hits are counted, and rows are fetched ahead of their step
    # and locked until the step has been trained. On CPU there is no cache.
    kernels = {spec.compute_kernel for module in plan.plan.values() for spec in module.values()}
    cache = CACHE_SETTINGS if device.type == "cuda" and CACHING_KERNEL in kernels else None
    # Each distinct unpooled id is sent to other ranks once per batch, and its gradients are sent as a sum.
    # FBGEMM (1.8.0) finds distinct ids only on GPUs, and in fp16 the sum of many gradients may overflow.
    deduplicate = device.type == "cuda" and world > 1 and config.plan.qcomms.backward_precision != "fp16"
    files = MappedFileFactory(config, shares[dist.get_rank()])
    with use_custom_lookups(files), substitute_torchrec_kernel(plan, MMAP_KERNEL, "fused"):
        sharded = DistributedModelParallel(
            model,
            device=device,
            plan=plan,
            sharders=make_sharders(cache, codecs, device.type, deduplicate),
            init_data_parallel=world > 1,  # a single rank has no gradients to average
        )
    pad_empty_shards(sharded)
    if fill:
        fill_tables(sharded, config.run.seed)
    optimizer = combine_optimizers(sharded, optimizers, config.optim.dense)
    if config.train.max_grad_norm:
        optimizer = GlobalNormClip(optimizer, sharded, config.train.max_grad_norm, config.train.clip_tables)
    if config.train.ema:
        optimizer = DenseAverage(optimizer, sharded, config.train.ema)
    if config.train.on_nan == "skip":
        optimizer = SkipNonfiniteOptimizer(optimizer, model.head)
    managed = None
    if schema.managed:
        sharded_tables = LogicalState(sharded, optimizer).tables
        managed = ManagedBatches(sharded, sharded_tables, schema, config.run.seed, device)
    counts_flops = bool(resolve_features(schema, config.model).sequences) and not config.train.compile
    return Step(sharded, optimizer, device, config, steps, cache is not None, managed, counts_flops), plan


def compute_run_plan(config: RunConfig, schema: Schema, device: torch.device) -> ShardingPlan:
    """Return the sharding plan that `build_step` would use, without allocating any table.

    This is a collective operation: every rank must call it.

    Raises:
        ConfigError: As for `build_step`.
    """
    world = dist.get_world_size()
    planners = make_planning_sharders(config, schema, world)
    return make_plan(build_unsharded(config, schema, device, world), planners, schema, config, device)


def build_unsharded(
    config: RunConfig, schema: Schema, device: torch.device, world: int = 1, objective: type[Objective] = Objective
) -> LossModel:
    """Return the unsharded model with its objective; dense layers are on `device`, and tables on the meta device.

    Args:
        config: Configuration of the run.
        schema: Schema of the data.
        device: Device of the rank.
        world: Number of ranks that train the model together.
        objective: Class that turns the model's logits into losses and outputs.

    Raises:
        ConfigError: The tasks do not fit the schema or the model.
    """
    task_objective = objective.of(config, schema, world)
    tasks = task_objective.tasks
    recommender = build_recommender(config, schema, device, count_logits(tasks), needs_vectors(tasks))
    add_temperatures(recommender.model, tasks)
    if world > 1:
        share_negatives_across_ranks(recommender.model, Peers(device))
    ranks_items = config.eval.retrieval is not None and objective is Objective
    return LossModel(recommender, task_objective, query_vectors=ranks_items)


def begin_or_resume(
    context: WorkerContext, step: Step, state: LogicalState, progress: Progress
) -> dict[str, Any] | None:
    """Restore the newest checkpoint that training can resume from, or initialize the weights if the run has none.

    This is a collective operation: every rank must call it. `state` (of the step's model and optimizer) and `progress`
    are overwritten.

    Returns:
        Entry "about" of the restored checkpoint's index; None if a new run begins.

    Raises:
        CheckpointError: At least one checkpoint has a usable index, but no checkpoint can be loaded.
        DataError, OSError, KeyError: See `restore`.
        RunError, SchemaError: See `begin`.
    """
    on_load = partial(context.enter_phase, "restoring a checkpoint", "restore")
    restored = restore(context.task.checkpoint, state, step.maps, find_progress_problem, on_load)
    for reason in restored.skip_reasons:
        context.report(messages.Warn(text=f"skipped a checkpoint: {reason}"))
    if not restored.folder:
        context.enter_phase("setting initial values", "plan")
        begin(step, context.task.config, context.task.schema, context.task.datasets["train"].log_odds)
        return None
    progress.resume(restored.about["progress"])
    step.trained = progress.step
    return restored.about


def begin(step: Step, config: RunConfig, schema: Schema, log_odds: Sequence[float] = ()) -> None:
    """Initialize the tables from run.seed, then load weights from warm_start.from if set.

    This is a collective operation: every rank must call it. `build_step` has already initialized the dense layers.

    Args:
        step: Step whose model is initialized.
        config: Configuration of the run.
        schema: Schema of the data.
        log_odds: Initial biases of the model's Linear layer named logit, one per logit column; empty to keep the drawn
            biases. Ignored if the model has no such layer, or if the layer has no bias.

    Raises:
        RunError: The checkpoint of warm_start.from cannot be read, does not match the model, or is not finite.
        DataError: The path in warm_start.from is not valid, or a rank cannot reach the store.
        SchemaError: The schema in the checkpoint is not valid, or a table differs from the checkpoint and
            warm_start.tables does not allow the change.
    """
    fill_tables(step.model, config.run.seed)
    logit_layer = getattr(step.head.model, "logit", None)
    if log_odds and logit_layer is not None and logit_layer.bias is not None:
        with torch.no_grad():
            logit_layer.bias.copy_(torch.tensor(log_odds))
    if not config.warm_start.from_:
        return
    index = read_index(config.warm_start.from_)
    starts = resolve_warm_starts(config, parse_stored_schema(index["about"]), schema)
    rows = {table: start.rows for table, start in starts.items() if start.policy == "resize"}
    new_tables = {table for table, start in starts.items() if start.policy == "new"}
    state = LogicalState(step.model, step.optimizer, with_optimizer=config.warm_start.optimizer)
    # Averages (train.ema) only cover the steps of this run, so saved averages are not loaded.
    tensors = {name: v for name, v in state.tensors(rows, new_tables).items() if not is_average(name)}
    if config.warm_start.dense == "matching":
        saved = {name: entry["shape"] for name, entry in index["tensors"].items()}
        tensors = {
            name: value
            for name, value in tensors.items()
            if not name.startswith("dense/") or saved.get(name) == list(value.shape)
        }
    exact_maps = {table: m for table, m in step.maps.items() if starts[table].policy == "exact"}
    load_with_ids(config.warm_start.from_, tensors, exact_maps, index["about"], rows, new_run=True)
    if nonfinite := summarize_over_ranks(find_nonfinite(tensors, state.unbounded)):
        raise RunError(
            f"the checkpoint of the warm start contains NaN or infinity: {nonfinite}",
            where=f"warm_start.from={config.warm_start.from_}",
            expected=f"finite weights{' and optimizer state' * config.warm_start.optimizer}",
            do="use an earlier checkpoint"
            + (", or set warm_start.optimizer=false if all weights are finite" if config.warm_start.optimizer else ""),
        )
    state.refresh_kernels()


def load_step(context: WorkerContext, objective: type[Objective] = Objective) -> Step:
    """Build a step for evaluation, and load the weights of the task's checkpoint.

    Weights with NaN or infinity cause a warning to the user. This is a collective operation: every rank must call it.

    Args:
        context: Context of the rank; context.task.checkpoint is the folder of the checkpoint.
        objective: Class that turns the model's logits into losses and outputs; see `build_step`.

    Raises:
        CheckpointError: The checkpoint cannot be read, or does not match the model.
        DataError, KeyError: See `load_with_ids`.
        RunError, ConfigError: See `build_step`.
    """
    task = context.task
    context.enter_phase("loading the checkpoint", "restore")
    step, _ = build_step(
        exclude_training_memory(task.config), task.schema, context.device, fill=False, objective=objective
    )
    state = LogicalState(step.model, step.optimizer, with_optimizer=False)
    load_with_ids(task.checkpoint, state.tensors(), step.maps, read_index(task.checkpoint)["about"])
    if nonfinite := summarize_over_ranks(find_nonfinite(state.tensors(), state.unbounded)):
        results = "metrics" if objective is Objective else "predictions"
        text = f"{results} may be invalid: the checkpoint contains NaN or infinity: {nonfinite}"
        context.report(messages.Warn(text=text))
    return step

"""Operations, memory traffic and kernel launches of the dense layers in a step.

The numbers come from running the layers on the meta device, or on CPU with few rows, or from the weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from raytrec.compat.torch_ import EveryOperator, describe_operator, get_storage_key, silence_tracing
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema

MAX_META_ROWS, NUM_CPU_ROWS = 8192, 64  # rows above which counts are extrapolated, and rows of the first count on CPU
# Name prefixes of operators that compute nothing, in addition to views.
UNCOUNTED_OPERATORS = ("empty", "detach", "_local_scalar_dense", "sym_", "is_pinned", "_unsafe_view", "_reshape_alias")


@dataclass(frozen=True)
class DenseWork:
    """Work of the dense layers in one rank's part of a step.

    Attributes:
        flops: Floating-point operations of matrix products, forward and backward; multiply and add count as two.
        matrices: Number of small matrices in batched matrix products.
        bytes: Bytes read and written by other operators. The traffic of matrix products overlaps with their
            arithmetic and is not counted.
        launches: Number of operators that compute something; each counts as one kernel on a GPU.
        parameters: Bytes of the parameters.
        tensors: Number of parameter tensors.
        activations: Peak bytes of live tensors that the step creates, except the parameters' gradients; for
            extrapolated counts, bytes of tensors that are live between forward and backward.
    """

    flops: float
    matrices: float
    bytes: float
    launches: float
    parameters: float
    tensors: int
    activations: float


def estimate_dense_work(parameters: Iterable[torch.Tensor], rows: int) -> DenseWork:
    """Return the approximate work of dense layers for a number of rows, estimated from the weights' shapes.

    The estimate replaces counting where counting takes too long. Each weight is assumed to be used once per
    row. The constants are those of a DCN-v2: 32 bytes per input or output value and 9 operators per tensor. The
    results for `matrices` and `activations` are 0.
    """
    params = [parameter for parameter in parameters if parameter.requires_grad]
    values, widths = sum(each.numel() for each in params), sum(sum(each.shape) for each in params)
    return DenseWork(6.0 * values * rows, 0.0, 32.0 * widths * rows, 9.0 * len(params), 4.0 * values, len(params), 0.0)


class OperatorCounter(EveryOperator):
    """Context manager that counts the operators run inside its block.

    Attributes:
        flops: See DenseWork.
        matrices: See DenseWork.
        bytes: See DenseWork.
        launches: See DenseWork.
        alive: Bytes of live tensors created inside the block; between forward and backward, the activations.
        peak: Maximum of `alive`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.matrices = self.bytes = self.launches = self.alive = self.peak = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, operator, is_view = describe_operator(func)
        if is_view:
            return out
        inputs, results = list(_iterate_tensors((args, kwargs))), list(_iterate_tensors(out))
        if not name.partition("::")[2].startswith(UNCOUNTED_OPERATORS):
            self.launches += 1
            if (count := flop_registry.get(operator)) is not None:
                self.flops += count(*args, **(kwargs or {}), out_val=out)
                self.matrices += len(results[0]) if results and results[0].dim() == 3 else 0
            else:
                self.bytes += sum(map(_count_bytes, inputs)) + sum(map(_count_bytes, results))
        input_keys = {get_storage_key(tensor.untyped_storage()) for tensor in inputs}
        for storage in (tensor.untyped_storage() for tensor in results):
            key, size = get_storage_key(storage), storage.nbytes()
            if key not in input_keys and key not in self._storages:
                self._storages.add(key)
                self.alive += size
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self._forget, key, size)
        return out

    def _forget(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.alive -= size


def _iterate_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _iterate_tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _iterate_tensors(each)


def _count_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's stored values; an expanded value is counted once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride) * tensor.element_size()


def count_dense_layers(
    build: Callable[[RunConfig, Schema, torch.device], Any], config: RunConfig, schema: Schema, rows: int
) -> DenseWork:
    """Count the work of the dense layers and losses, forward and backward, for the batch of one rank.

    Models that use autocast or read tensor values cannot run on the meta device. They run on CPU with two small numbers
    of rows, and the counts are extrapolated linearly. The counts for more than MAX_META_ROWS rows are also
    extrapolated. Models that read sequences are counted without bf16, with sequences of mean length, or of 0 to 4 ids
    without statistics. Losses that compare rows of a global batch are counted for the rows of this rank alone.
    Extrapolation underestimates losses that compare all pairs of rows.

    Args:
        build: Function that builds the model of one rank (worker.build.build_unsharded).
        config: Configuration of the run.
        schema: Schema of the data.
        rows: Number of rows in the batch of one rank.

    Raises:
        ConfigError: No model can be built from this schema.
        RuntimeError: The dense layers fail on CPU as well.
    """
    from raytrec.checks.parity.batches import make_local_batch, make_random_batches
    from raytrec.tasks.task import resolve_tasks

    silence_tracing()
    features, tasks = resolve_features(schema, config.model), resolve_tasks(config.tasks, schema)
    read = {name: statistics for name, statistics in schema.statistics.items() if name in features.sequences}
    lengths = {name: min(round(each.mean_length), features.sequences[name]) for name, each in read.items()}
    if features.sequences and config.train.matmul == "bf16":
        config = config.with_overrides(["train.matmul=fp32"])

    def count(device: str, rows: int) -> tuple[DenseWork, int]:
        """Return the work for a number of rows, and the bytes of tensors that are live between forward and backward."""
        counter = OperatorCounter()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            head = build(config, schema, torch.device("cpu")).head.to(device)
            (global_batch,) = make_random_batches(schema, rows, 1, 0, tasks, lengths)
            local_batch = make_local_batch(global_batch, schema, [0, rows], 0, features)
            batch = local_batch.to(torch.device(device))
            batch.lengths = local_batch.lengths
            looked_up = {}
            for name, spec in schema.sparse.items():
                length, dim = features.sequences.get(name), schema.tables[spec.table].dim
                shape = (rows, length, dim) if length else (rows, dim)
                looked_up[name] = torch.zeros(shape, device=device, requires_grad=True)
            with counter:
                loss, _ = head(looked_up, batch)
                live_bytes = counter.alive
                loss.backward()
        parameters = list(head.parameters())
        size = sum(p.numel() * p.element_size() for p in parameters)
        activations = max(0.0, counter.peak - size)
        work = counter.flops, counter.matrices, counter.bytes, counter.launches
        return DenseWork(*work, size, len(parameters), activations), live_bytes

    try:
        if rows <= MAX_META_ROWS:
            return count("meta", rows)[0]
        base = MAX_META_ROWS // 2
        (first, live), (second, second_live) = count("meta", base), count("meta", 2 * base)
    except RuntimeError:
        base = NUM_CPU_ROWS
        (first, live), (second, second_live) = count("cpu", base), count("cpu", 2 * base)
    extra = rows / base - 1
    scaled = {
        name: max(0.0, getattr(first, name) + extra * (getattr(second, name) - getattr(first, name)))
        for name in ("flops", "matrices", "bytes")
    }
    return replace(first, **scaled, activations=max(0.0, live + extra * (second_live - live)))

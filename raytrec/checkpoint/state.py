"""The state of a run: tables, dense layers and optimizers, under names that do not depend on the plan.

    tables/NAME/weight     weights, [rows, dim]
    tables/NAME/KIND       optimizer state: [rows, dim], or [rows] with one value per row
    tables/NAME/step       number of updates by the table's optimizer, if the optimizer counts them (0-dim)
    dense/FQN/value        parameter or buffer of the dense layers
    dense/FQN/KIND         optimizer state of the parameter
    dense/FQN/ema          average of the parameter over steps (train.ema)
    dense/ema/count        number of steps in these averages (0-dim)

TorchRec's keys depend on the plan, so its state dicts can be loaded only under the same plan. For example, the state
of data-parallel and of row-wise tables has different keys (TorchRec issue #2394).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from raytrec.checkpoint.blocks import iterate_row_pieces
from raytrec.checks.live.outcome import group_by_rarity, read_flat_values
from raytrec.common.collectives import Peers
from raytrec.common.formatting import format_count
from raytrec.compat.fbgemm import find_fused_lookup, get_update_count, set_update_count
from raytrec.compat.torch_ import Shard, ShardedTensor, ShardMetadata, list_local_parts, make_sharded_tensor
from raytrec.compat.torchrec_ import (
    iterate_sharded_kernels,
    iterate_torch_optimizers,
    list_kernel_tables,
    unwrap_optimizer,
)
from raytrec.embeddings.optim import find_dense_average
from raytrec.embeddings.optimizers import OPTIMIZERS
from raytrec.embeddings.pooling import find_table_name
from raytrec.embeddings.tables import ShardedValues, Table, tables

State = dict[str, torch.Tensor | ShardedTensor]
EMA_COUNT = "dense/ema/count"
MAX_SHOWN_TENSORS = 3  # maximum number of tensors named in an error
PIECE_BYTES = 4 << 20  # unit in which tensors are checked for NaN and infinity


class LogicalState:
    """Live state of a sharded model and its optimizer.

    The tensors share memory with the model. After writing to them, call `refresh_kernels`.

    Args:
        model: Model built by `worker.build.build_step`.
        optimizer: Optimizer built by `worker.build.build_step`.
        with_optimizer: True to include optimizer state. Averages of dense weights are always included.

    Attributes:
        tables: Live tables by name.
        dense: Other live tensors by name: dense layers, their optimizer state and averages, and tables' update counts.
        unbounded: Names of the dense layers' buffers that contain NaN or infinity at creation, such as masks.
    """

    def __init__(self, model: DistributedModelParallel, optimizer: KeyedOptimizer, *, with_optimizer: bool = True):
        plain = unwrap_optimizer(optimizer)
        if with_optimizer:
            _make_lazy_state(plain)
        self._kernels = list(iterate_sharded_kernels(model))
        self.tables: dict[str, Table] = tables(model, plain if with_optimizer else None)
        values = {fqn: value for fqn, value in model.state_dict().items() if find_table_name(fqn) is None}
        self.dense = {f"dense/{fqn}/value": value.detach() for fqn, value in values.items()}
        if average := find_dense_average(optimizer):
            self.dense |= {f"dense/{fqn}/ema": value for fqn, value in average.values.items()}
            self.dense[EMA_COUNT] = average.count
        buffers = {f"dense/{name}/value" for name, _ in model.named_buffers()}
        built = {name: value for name, value in self.dense.items() if name in buffers}
        self.unbounded = frozenset(find_nonfinite(built))
        self._fused_steps: list[tuple[nn.Module, torch.Tensor]] = []
        if with_optimizer:
            self.dense |= {
                f"dense/{fqn}/{kind}": value
                for fqn, states in plain.state_dict()["state"].items()
                if find_table_name(fqn) is None
                for kind, value in states.items()
                if isinstance(value, torch.Tensor)
            }
            self.dense |= self._collect_table_steps(model, plain)

    def tensors(self, rows: dict[str, int] | None = None, leave_out: Set[str] = frozenset()) -> State:
        """Return live tensors by name: ShardedTensors for sharded tables, plain tensors for replicated values.

        Cached rows are first written back, and update counts refreshed. Call this method again after further steps.

        Args:
            rows: Table → number of leading rows to include. Other tables are included as a whole.
            leave_out: Names of tables to omit.
        """
        for kernel in self._kernels:
            kernel.flush()  # writes cached rows back to the shards
        for kernel, step in self._fused_steps:
            step.fill_(float(get_update_count(kernel)))
        left_out = tuple(f"tables/{table}/" for table in leave_out)
        out: State = {name: value for name, value in self.dense.items() if not name.startswith(left_out)}
        for name, table in self.tables.items():
            if name in leave_out:
                continue
            for kind, parts in {"weight": table.weight, **table.state}.items():
                out[f"tables/{name}/{kind}"] = make_logical_tensor(parts, (rows or {}).get(name))
        return out

    def refresh_kernels(self) -> None:
        """Update values that kernels derive from the tensors; call after writing to the tensors."""
        for kernel in self._kernels:
            kernel.purge()  # drops cached rows
        for kernel, step in self._fused_steps:
            set_update_count(kernel, int(step))

    def _collect_table_steps(self, model: DistributedModelParallel, optimizer: KeyedOptimizer) -> State:
        """Return the update counts of local tables whose optimizer counts its updates."""
        steps: State = {}
        for fqn, states in optimizer.state_dict()["state"].items():
            # torch may also count steps in other optimizers, for a learning-rate decay that raytrec never sets.
            if (table := find_table_name(fqn)) and self.tables[table].optimizer.counts and "step" in states:
                steps[f"tables/{table}/step"] = states["step"]
        for kernel in iterate_sharded_kernels(model):
            counting = [table for table in list_kernel_tables(kernel) if self.tables[table.name].optimizer.counts]
            if not counting or find_fused_lookup(kernel) is None:  # torch keeps the count in its own state
                continue
            step = torch.tensor(0.0)  # float32 as in torch
            steps |= {f"tables/{table.name}/step": step for table in counting}
            self._fused_steps.append((kernel, step))
        return steps


def make_logical_tensor(parts: ShardedValues, rows: int | None = None) -> torch.Tensor | ShardedTensor:
    """Return a tensor over a table's live values in the form that torch.distributed.checkpoint expects.

    Args:
        parts: Weights or optimizer state of the table.
        rows: Number of leading rows to include; None: all rows.
    """
    rows = parts.shape[0] if rows is None else rows
    if parts.replicated:
        return parts.shards[0].values[:rows]
    local, all_metadata = [], []
    for shard in parts.shards:
        count = max(0, min(shard.rows.stop, rows) - shard.rows.start)
        if not count:
            continue
        metadata = ShardMetadata(
            shard_offsets=[shard.rows.start, shard.columns.start][: len(parts.shape)],
            shard_sizes=[count, len(shard.columns)][: len(parts.shape)],
            # For remote shards, only the rank matters; a local shard's device must match its placement.
            placement=f"rank:{shard.rank}/{parts.device if shard.values is None else shard.values.device}",
        )
        all_metadata.append(metadata)
        if shard.values is not None:
            local.append(Shard(shard.values[:count], metadata))
    return make_sharded_tensor(local, all_metadata, (rows, *parts.shape[1:]), parts.dtype)


def is_average(name: str) -> bool:
    """Return True if a name denotes an average over steps, or the number of averaged steps (train.ema)."""
    return name.startswith("dense/") and (name.endswith("/ema") or name == EMA_COUNT)


def _make_lazy_state(optimizer: KeyedOptimizer) -> None:
    """Create the optimizer state that torch (2.13.0) creates only in the first step, so that it can be loaded.

    As in torch, the step count is in host memory, except for fused and capturable groups, whose kernels require
    all tensors on one device.
    """
    definitions = {part.torch_class(): part for part in OPTIMIZERS.parts.values()}
    for inner in iterate_torch_optimizers(optimizer):
        definition = definitions[type(inner)]
        if not definition.state:
            continue
        for group, parameter in ((g, p) for g in inner.param_groups for p in g["params"]):
            state = inner.state[parameter]
            if state:
                continue
            if definition.counts:
                on_device = group.get("fused") or group.get("capturable")
                state["step"] = torch.tensor(0.0, device=parameter.device if on_device else None)
            for kind, per, _ in definition.state:
                state[kind] = torch.zeros_like(parameter if per == "value" else parameter[:, :1])


def find_nonfinite(
    tensors: State,
    unchecked_names: frozenset[str] = frozenset(),
    pieces_of: Callable[[torch.Tensor, int], Iterable[torch.Tensor]] = iterate_row_pieces,
) -> list[str]:
    """Return the names of tensors whose part on this rank contains NaN or infinity.

    By default, values are read in place, without a copy.

    Args:
        tensors: Tensors by name.
        unchecked_names: Names of tensors that are not checked (LogicalState.unbounded).
        pieces_of: Function that yields the values of a tensor in pieces of a given number of bytes; by default,
            the tensor's current values.
    """
    names, flags = [], []
    for name, value in tensors.items():
        for part in list_local_parts(value) if name not in unchecked_names else ():
            if part.numel() and part.is_floating_point():
                names.append(name)
                pieces = pieces_of(part.detach(), PIECE_BYTES)
                flags.append(torch.stack([_are_finite(values) for values in pieces]).all())
    return list(dict.fromkeys(name for name, (ok,) in zip(names, read_flat_values(flags), strict=True) if not ok))


def summarize_over_ranks(local_names: list[str], group: dist.ProcessGroup | None = None) -> str | None:
    """Return a description of the tensors named by any rank, with those ranks; None if no rank named a tensor.

    At most MAX_SHOWN_TENSORS are named; the others are counted. This is a collective operation: every rank must call
    it.

    Args:
        local_names: Result of `find_nonfinite` on this rank.
        group: Process group; None: all ranks.
    """
    peers = Peers(group=group)
    if not peers.max_number(bool(local_names)):
        return None
    affected = group_by_rarity(peers.objects(local_names))
    descriptions = [f"{describe_tensor(name)} on {where}" for name, where in affected[:MAX_SHOWN_TENSORS]]
    more = len(affected) - MAX_SHOWN_TENSORS
    return "; ".join(descriptions) + (f"; and {format_count(more, 'more tensor')}" if more > 0 else "")


def describe_tensor(name: str) -> str:
    """Return a description of a tensor for the user.

    For example, `tables/user/sum` becomes "table user's sum", and `dense/top.0.weight/value` becomes
    "top.0.weight".
    """
    part, _, path = name.partition("/")
    item, _, kind = path.rpartition("/")
    return f"table {item}'s {kind}" if part == "tables" else item if kind == "value" else f"{item}'s {kind}"


def _are_finite(values: torch.Tensor) -> torch.Tensor:
    """Return True, as a bool scalar tensor, if all values are finite.

    NaN and infinity propagate to the sum, and to the minimum or maximum. Both methods take one pass without extra
    memory; torch.isfinite first creates a mask, and takes 40 times as long on a CPU. The sum is 3 times as fast
    as minimum and maximum, but may overflow although all values are finite. A sum that is not finite is therefore
    verified by minimum and maximum.
    """
    if values.dtype in (torch.float32, torch.float64) and values.device.type == "cpu":
        summed = values.sum().isfinite()
        if summed:
            return summed
    return torch.stack(values.aminmax()).isfinite().all()

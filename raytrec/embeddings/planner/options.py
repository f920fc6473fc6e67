"""What TorchRec's planner is told of tables: what they may have, and what that takes."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption, Storage
from torchrec.distributed.types import CacheAlgorithm, CacheParams

from raytrec.embeddings.planner.constraints import TableConstraint
from raytrec.embeddings.planner.footprint import ROW_STATE_BYTES, STATE_BYTES, UVM_KERNELS
from raytrec.embeddings.planner.search import estimate_once_per_size


def torchrec_constraints(pin: TableConstraint, kernels: list[str], **more: Any) -> ParameterConstraints:
    """TorchRec's, of a table.

    Args:
        kernels: to choose from, where the constraint has none. (data_parallel is dense whatever they are.)
        more: of ParameterConstraints.
    """
    chosen = [pin.kernel] if pin.kernel not in (None, "dense") else ["dense", *kernels]
    algorithm = CacheAlgorithm[pin.algorithm.upper()] if pin.algorithm else None
    cache = CacheParams(algorithm=algorithm, load_factor=pin.load_factor)
    return ParameterConstraints(
        sharding_types=list(pin.sharding),
        compute_kernels=chosen,
        cache_params=cache if pin.algorithm or pin.load_factor else None,
        **more,
    )


class Enumerator(EmbeddingEnumerator):
    """Counts weights and optimizer state as FBGEMM holds them, and where.

    TorchRec (1.8.0) takes state to be of the weights' dtype, which is half of what it is beside fp16 tables,
    and to be where the weights are, although one value a row is on the GPU even if the weights are not. It
    knows of no tables in files.

    Args:
        fused: table → the optimizer that updates it in backward; of the others TorchRec counts no state.
        on_disk: tables in files.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints],
        fused: Mapping[str, str],
        on_disk: Set[str] = frozenset(),
    ):
        super().__init__(topology, batch_size, constraints)
        self._on_gpus, self._fused = topology.compute_device == "cuda", fused
        self._on_disk = on_disk

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        estimate_once_per_size(sharding_options, super().populate_estimates)
        for option in sharding_options:
            if option.name in self._fused:
                for shard in option.shards:
                    shard.storage += self._uncounted_state(option, *shard.size)

    def _uncounted_state(self, option: ShardingOption, rows: int, dim: int) -> Storage:
        optimizer = self._fused[option.name]
        per_row = rows * ROW_STATE_BYTES[optimizer]
        per_value = rows * dim * STATE_BYTES[optimizer]
        counted = (per_row + per_value) * option.tensor.element_size() // 4
        if self._on_gpus and option.compute_kernel in UVM_KERNELS:
            return Storage(hbm=per_row, ddr=per_value - counted)
        missing = per_row + per_value - counted
        if option.name in self._on_disk:
            in_memory = rows * dim * option.tensor.element_size() + counted
            return Storage(hbm=0, ddr=-in_memory, ssd=in_memory + missing)
        return Storage(hbm=missing, ddr=0) if self._on_gpus else Storage(hbm=0, ddr=missing)

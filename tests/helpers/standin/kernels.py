"""FBGEMM's CUDA kernels, computed by its CPU kernels on tables that report a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from standin.tensor import to_device_tensor

fbgemm_library = torch.library.Library("fbgemm", "IMPL")
# Prefixes of tensors that are on the device in FBGEMM's CUDA kernels (1.8.0); learning rates are on the host.
DEVICE_TENSOR_PREFIXES = ("weights", "momentum")


@contextmanager
def use_cpu_kernels() -> Iterator[None]:
    """Build all kernels created in this block for CPU."""
    fused = SplitTableBatchedEmbeddingBagsCodegen.__init__
    dense = DenseTableBatchedEmbeddingBagsCodegen.__init__

    def init_fused(self: Any, embedding_specs: list, *args: Any, **kwargs: Any) -> None:
        specs = [(r, d, EmbeddingLocation.HOST, ComputeDevice.CPU) for r, d, *_ in embedding_specs]
        fused(self, specs, *args, **kwargs | {"device": torch.device("cpu")})
        _place(self)

    def init_dense(self: Any, embedding_specs: list, *args: Any, **kwargs: Any) -> None:
        dense(self, embedding_specs, *args, **kwargs | {"use_cpu": True})
        _place(self)

    with (
        patch.object(SplitTableBatchedEmbeddingBagsCodegen, "__init__", init_fused),
        patch.object(DenseTableBatchedEmbeddingBagsCodegen, "__init__", init_dense),
    ):
        yield


def jagged_unique_indices(
    first_rows: torch.Tensor, first_features: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the distinct ids of each table, distributed evenly over its bags.

    Args:
        first_rows: int64 [features + 1], first row of each feature's table in the concatenated tables.
        first_features: int64 [features + 1], first feature of each feature's table.
        offsets: int64 [features × rows + 1], bag offsets.
        ids: int64 [N].

    Returns:
        Bag lengths, bag offsets, distinct ids, and the index of each input id in the distinct ids.
    """
    features = len(first_rows) - 1
    of_features = offsets[:: (len(offsets) - 1) // features].diff()
    rows = ids + first_rows[:-1].repeat_interleave(of_features)
    distinct, places = rows.unique(return_inverse=True)
    starts = first_rows[first_features.unique()]  # of tables
    counts = torch.searchsorted(distinct, starts).diff().tolist()
    lengths = []
    for count, wide in zip(counts, first_features.unique().diff().tolist(), strict=True):
        bags = torch.arange(wide * (len(offsets) - 1) // features)
        lengths.append(count // len(bags) + (bags < count % len(bags)).long())
    lengths = torch.cat(lengths)
    own = distinct - starts[:-1].repeat_interleave(torch.tensor(counts))
    return lengths, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), own, places


fbgemm_library.impl("jagged_unique_indices", jagged_unique_indices, "CPU")


def _place(kernel: torch.nn.Module) -> None:
    for name, value in list(kernel._parameters.items()):
        if value is not None and name.startswith(DEVICE_TENSOR_PREFIXES):
            kernel._parameters[name] = torch.nn.Parameter(to_device_tensor(value.detach()), value.requires_grad)
    for name, value in list(kernel._buffers.items()):
        if value is not None and (name.startswith(DEVICE_TENSOR_PREFIXES) or name == "iter"):
            kernel._buffers[name] = to_device_tensor(value)

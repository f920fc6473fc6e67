"""FBGEMM's kernels for CUDA, computed by those for CPU on tables that claim to lie on the GPU."""

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

from standin.tensor import place

# What lies on the device in FBGEMM's kernels for CUDA (1.8.0); learning rates lie in host memory.
ON_DEVICE = ("weights", "momentum")


@contextmanager
def kernels() -> Iterator[None]:
    """Kernels are built for CPU, whatever they are asked for."""
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


def _place(kernel: torch.nn.Module) -> None:
    for name, value in list(kernel._parameters.items()):
        if value is not None and name.startswith(ON_DEVICE):
            kernel._parameters[name] = torch.nn.Parameter(place(value.detach()), value.requires_grad)
    for name, value in list(kernel._buffers.items()):
        if value is not None and (name.startswith(ON_DEVICE) or name == "iter"):
            kernel._buffers[name] = place(value)

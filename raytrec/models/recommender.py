"""Recommenders: embedding tables and a dense model that together map features to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raytrec.common.machine import require_compiler
from raytrec.compat.torch_ import quote_library_folder
from raytrec.config.features import resolve_features
from raytrec.config.models import PythonSection
from raytrec.config.models.base import ModelSection
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tasks import TowerName
from raytrec.data.batch import Batch
from raytrec.embeddings.constraints import resolve_constraints
from raytrec.embeddings.pooling import PooledEmbeddings
from raytrec.models import build_model
from raytrec.models.inputs import RequestExpander, SequenceLookup


class Recommender(nn.Module):
    """Embedding tables and the dense model that maps their pooled embeddings to logits.

    A recommender reads no labels. The losses of the tasks define the meaning of the logits.

    Args:
        embeddings: Module with the tables, which looks up and pools the sparse features.
        model: Dense model with forward(dense, inputs of sparse features) → logits; see raytrec/models.
        call: Function object that calls the dense model.
    """

    def __init__(self, embeddings: PooledEmbeddings, model: nn.Module, call: ModelCall):
        super().__init__()
        self.embeddings, self.model, self.call = embeddings, model, call

    def forward(self, batch: Batch, tower: TowerName | None = None) -> torch.Tensor:
        """Return the logits of a batch, or the vectors of one tower; see `ModelCall.__call__`."""
        return self.call(self.model, batch, self.embeddings(batch.sparse), tower)


class ModelCall:
    """Function object that prepares inputs from pooled embeddings and calls a dense model.

    Args:
        sequences: Converter from embeddings to the model's inputs; None: the embeddings are the inputs.
        bf16: True to multiply matrices in bfloat16 (autocast); outputs are converted back to float32.
        examples: Converter from inputs of requests to inputs of their candidates; None: each row is an
            example.

    Attributes:
        graph_rows: Number of rows in batches that are replayed as CUDA graphs (`compile_dense`); None: no
            CUDA graphs.
    """

    graph_rows: int | None = None

    def __init__(self, sequences: SequenceLookup | None, bf16: bool, examples: RequestExpander | None):
        self._sequences, self._bf16, self._examples = sequences, bf16, examples

    def __call__(
        self, model: nn.Module, batch: Batch, pooled: dict[str, torch.Tensor], tower: TowerName | None = None
    ) -> torch.Tensor:
        """Return the logits, float32 [B] or [B, columns], or the vectors of one tower, float32 [B, width].

        If the rows of the batch are requests, B is the number of their candidates.

        Args:
            model: Dense model, possibly compiled.
            batch: Batch of rows; its labels are not read.
            pooled: Output of PooledEmbeddings for the batch.
            tower: Method of a retrieval model to call instead of forward: "query", "item", or None for forward.
        """
        dense, inputs, requests = batch.dense, pooled, batch.requests
        if self._sequences:
            inputs = self._sequences(pooled, batch)
        if requests is not None and self._examples is not None:
            dense, inputs = self._examples(batch, inputs)
        called = getattr(model, tower) if tower else model
        output = self.run(called, dense, inputs)
        output = output if requests is None else output[: len(requests)]
        return select_last_vectors(output) if tower else output

    def run(self, module_or_method: Callable[..., torch.Tensor], dense: torch.Tensor, *inputs: Any) -> torch.Tensor:
        """Call a model or one of its methods with the configured precision, and return the output in float32.

        With `graph_rows`, a call with another number of rows in `dense` runs uncompiled.
        """
        if self.graph_rows is None:
            return self._run(module_or_method, dense, *inputs)
        if len(dense) != self.graph_rows:  # any other size would compile the model again and record another graph
            with torch.compiler.set_stance("force_eager"):
                return self._run(module_or_method, dense, *inputs)
        torch.compiler.cudagraph_mark_step_begin()
        return self._run(module_or_method, dense, *inputs).clone()  # the next replay overwrites the output

    def _run(self, called: Callable[..., torch.Tensor], dense: torch.Tensor, *inputs: Any) -> torch.Tensor:
        if not self._bf16:
            return called(dense, *inputs)
        with torch.autocast(dense.device.type, torch.bfloat16):
            output = called(dense, *inputs)
        return output.float()


def select_last_vectors(vectors: torch.Tensor) -> torch.Tensor:
    """Return the last vector of each row, [B, n, width] → [B, width]; vectors [B, width] are returned unchanged."""
    return vectors[:, -1] if vectors.dim() == 3 else vectors


def build_recommender(
    config: RunConfig,
    schema: Schema,
    device: torch.device,
    tasks: Mapping[str, int] | None = None,
    vectors: bool = False,
) -> Recommender:
    """Return the unsharded recommender that is configured in the section `model`, with tables on device meta.

    torch's random number generator is seeded with run.seed, from which the dense layers are initialized.

    Args:
        config: Configuration of the run.
        schema: Schema of the data.
        device: Device of the dense layers.
        tasks: Task → number of its logit columns; see build_model.
        vectors: True if the model must also return query and item vectors.

    Raises:
        ConfigError: The model (see `build_model`) or a table's plan contradicts the schema.
        Exception: Any error raised by the module or the constructor of a user-defined model.
    """
    torch.manual_seed(config.run.seed)
    model = build_model(schema, config.model, tasks, vectors).to(device)
    constraints, features = resolve_constraints(config, schema), resolve_features(schema, config.model)
    sequences = SequenceLookup(features, config.model.reads_ids(schema)) if features.sequences else None
    examples = RequestExpander(schema, _find_request_features(config.model, schema)) if schema.candidates else None
    call = ModelCall(sequences, config.train.matmul == "bf16", examples)
    return Recommender(PooledEmbeddings(schema, constraints, features.sequences), model, call)


def _find_request_features(model: ModelSection, schema: Schema) -> set[str]:
    """Return the sparse features encoded once per request; none for user-defined models, or if one is a candidate's."""
    members = set() if isinstance(model, PythonSection) else model.request_members(schema)
    return set() if schema.select_candidate_names(members) else members & {*schema.sparse}


def compile_dense(model: nn.Module, call: ModelCall, device: torch.device, graph_rows: int | None = None) -> None:
    """Enable compilation of a dense model with torch.compile, in place. The model's parameters keep their names.

    Training and evaluation are compiled separately, each in its first step. Without CUDA graphs, sizes are
    dynamic, so a smaller batch does not recompile the model. With CUDA graphs, batches of other sizes run
    uncompiled. Each replay overwrites the previous output, so logits are copied. Gradients need no copy: they
    are consumed before the next replay, and TorchRec's optimizers release them before a forward pass.

    Args:
        model: Dense model.
        call: Function object that calls the model; its attribute `graph_rows` is set.
        device: Device of the model.
        graph_rows: Number of rows in batches that are recorded and replayed as CUDA graphs; None: no CUDA
            graphs.

    Raises:
        ConfigError: A requirement of torch.compile, such as a compiler, is not installed on this node.
    """
    require_compiler(device.type)
    quote_library_folder()
    if graph_rows is None:
        return model.compile(dynamic=True)
    model.compile(dynamic=False, mode="reduce-overhead")
    call.graph_rows = graph_rows


def checkpoint_activations(model: nn.Module) -> None:
    """Make the blocks of a dense model store only their inputs and recompute activations in backward.

    The model changes in place; parameters keep their names. The blocks are the model's direct children and
    the entries of its module lists and dicts. In backward, only one block's activations exist at a time.
    Values, gradients and random numbers (dropout) are bitwise identical to those without checkpointing.
    """
    for block in _blocks(model):
        block.forward = _wrap_checkpoint(block, block.forward)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _blocks(child)
        else:
            yield child


def _wrap_checkpoint(block: nn.Module, forward: Callable) -> Callable:
    def run(*inputs: Any, **options: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            return checkpoint(forward, *inputs, use_reentrant=False, **options)
        return forward(*inputs, **options)

    return run

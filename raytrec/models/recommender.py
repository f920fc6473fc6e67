"""Recommenders: tables and a dense model, from features to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raytrec.common.machine import require_compiler
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
    """Tables and a dense model. No labels are read; the losses of the tasks define the meaning of the logits.

    Args:
        embeddings: Lookup and pooling of the tables.
        model: Dense model: forward(dense, inputs of the sparse features) → logits; see raytrec/models.
        call: Caller of the dense model.
    """

    def __init__(self, embeddings: PooledEmbeddings, model: nn.Module, call: ModelCall):
        super().__init__()
        self.embeddings, self.model, self.call = embeddings, model, call

    def forward(self, batch: Batch, tower: TowerName | None = None) -> torch.Tensor:
        """Return the logits of a batch, or the vectors of one tower; see ModelCall."""
        return self.call(self.model, batch, self.embeddings(batch.sparse), tower)


class ModelCall:
    """Caller of a dense model, which prepares its inputs from pooled embeddings.

    Args:
        sequences: Converter from embeddings to the model's inputs; None: the embeddings are the inputs.
        examples: Converter from inputs of requests to inputs of their candidates; None: each row is an
            example.
        bf16: True to multiply matrices in bfloat16 (autocast); logits are converted back to float32.

    Attributes:
        graph_rows: Rows of the batches replayed as CUDA graphs (`compile_dense`); None: no CUDA graphs.
    """

    graph_rows: int | None = None

    def __init__(
        self, sequences: SequenceLookup | None = None, bf16: bool = False, examples: RequestExpander | None = None
    ):
        self._sequences, self._bf16, self._examples = sequences, bf16, examples

    def __call__(
        self, model: nn.Module, batch: Batch, pooled: dict[str, torch.Tensor], tower: TowerName | None = None
    ) -> torch.Tensor:
        """Return the logits, float32 [B] or [B, columns]; or the vectors of one tower, float32 [B, width].

        Args:
            model: The dense model, perhaps compiled.
            batch: The batch; no labels are read.
            pooled: Output of PooledEmbeddings for the batch.
            tower: Method of a model that retrieves (raytrec/models); None for logits.
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
        """Call a model or one of its methods and return its output as float32."""
        if self.graph_rows is None:
            return self._run(module_or_method, dense, *inputs)
        if len(dense) != self.graph_rows:  # another size would compile and record a graph
            with torch.compiler.set_stance("force_eager"):
                return self._run(module_or_method, dense, *inputs)
        torch.compiler.cudagraph_mark_step_begin()
        return self._run(module_or_method, dense, *inputs).clone()  # the next replay overwrites it

    def _run(self, called: Callable[..., torch.Tensor], dense: torch.Tensor, *inputs: Any) -> torch.Tensor:
        if not self._bf16:
            return called(dense, *inputs)
        with torch.autocast(dense.device.type, torch.bfloat16):
            output = called(dense, *inputs)
        return output.float()


def select_last_vectors(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors [B, width]; if a query has one vector for each of several outputs, the last of these."""
    return vectors[:, -1] if vectors.dim() == 3 else vectors


def build_recommender(
    config: RunConfig,
    schema: Schema,
    device: torch.device,
    outputs: int = 1,
    vectors: bool = False,
    tasks: Mapping[str, int] | None = None,
) -> Recommender:
    """Return the configured model, not sharded. Dense layers are seeded by run.seed; tables are on meta.

    Args:
        config: Configuration of the run.
        schema: Schema of the data.
        device: Device of the dense layers.
        outputs: Number of columns of logits; see build_model.
        vectors: True if the model must also return query and item vectors; see build_model.
        tasks: Task → number of its columns; see build_model.
    """
    torch.manual_seed(config.run.seed)
    model = build_model(schema, config.model, outputs, vectors, tasks).to(device)
    constraints, features = resolve_constraints(config, schema), resolve_features(schema, config.model)
    sequences = SequenceLookup(features, config.model.reads_ids(schema)) if features.sequences else None
    examples = RequestExpander(schema, _find_request_features(config.model, schema)) if schema.candidates else None
    call = ModelCall(sequences, config.train.matmul == "bf16", examples)
    return Recommender(PooledEmbeddings(schema, constraints, features.sequences), model, call)


def _find_request_features(model: ModelSection, schema: Schema) -> set[str]:
    """Return the query features that the model encodes once per request, if none belongs to candidates."""
    if not model.retrieves or isinstance(model, PythonSection):
        return set()
    members = model.tower_members(schema)["query"]
    return set() if schema.select_candidate_names(members) else members & {*schema.sparse}


def compile_dense(model: nn.Module, call: ModelCall, device: torch.device, graph_rows: int | None = None) -> None:
    """Compile a dense model in place at its first forward. Parameters keep their names.

    Training and evaluation are compiled separately, each in its first step. Without CUDA graphs, sizes are
    dynamic, so a smaller batch does not recompile the model. With CUDA graphs, batches of other sizes are not
    compiled. A replay overwrites the output of the previous one, so logits are copied. Gradients have been
    used by then, and TorchRec's optimizers release them before a forward.

    Args:
        model: Dense model.
        call: Caller of the model.
        device: Device of the model.
        graph_rows: Rows of the batches to be recorded as CUDA graphs and replayed; None: no CUDA graphs.

    Raises:
        ConfigError: A compiler that torch needs is not installed on this node.
    """
    require_compiler(device.type)
    if graph_rows is None:
        return model.compile(dynamic=True)
    model.compile(dynamic=False, mode="reduce-overhead")
    call.graph_rows = graph_rows


def checkpoint_activations(model: nn.Module) -> None:
    """Have the blocks of a dense model store only their inputs and recompute activations in backward.

    The model changes in place; parameters keep their names. Blocks are the model's direct children, and the
    entries of its lists and dicts of modules. Only one block's activations exist at a time. Values and
    gradients are the same to the last bit, and so are random numbers (dropout).
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

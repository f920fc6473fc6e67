"""A dense model as programs of torch.export, which need torch alone."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export, save
from torch.export.graph_signature import InputKind

from raytrec.common.errors import ConfigError, RaytrecError, first_line
from raytrec.config.tasks import TowerName
from raytrec.models.inputs import Sequence as IdSequence
from raytrec.models.recommender import Recommender, last_vectors
from raytrec.scoring.late import example
from raytrec.scoring.manifest import Input
from raytrec.scoring.program_archive import NotAllowed, checked_archive
from raytrec.tasks.objective import Objective

EXAMPLE_ROWS = 3  # of 1 torch would make a program for 1 alone


@dataclass(frozen=True)
class Program:
    """A program, and the tensors that it takes, in their order.

    Attributes:
        exported: tensors → a tuple of tensors: each task's predictions, float32 [B] or [B, classes]; or a
            tower's vectors, float32 [B, width].
        model: what was exported.
    """

    exported: ExportedProgram
    inputs: tuple[Input, ...]
    model: Scored

    def written(self) -> bytes:
        """Return the file .pt2, without examples, which would be a pickle, and without paths of this machine.

        Raises:
            ConfigError: The model contains an operator that no export may have.
        """
        self.exported.example_inputs = None
        into = io.BytesIO()
        save(self.exported, into)
        try:
            return checked_archive(into.getvalue())
        except NotAllowed as error:
            raise ConfigError(
                f"the exported model contains {error}",
                expected="operators of torch.ops.aten that check all sizes and indices",
                do="write the model with those that OPERATORS in raytrec/scoring/program_archive.py lists",
            ) from error


def make_program(
    recommender: Recommender, objective: Objective, inputs: Collection[Input], tower: TowerName | None = None
) -> Program:
    """A recommender's dense model from those of the inputs that it reads.

    Args:
        inputs: those that there are.
        tower: whose vectors are wanted; None: the predictions of the objective's tasks.

    Raises:
        ConfigError: torch cannot export the model.
    """
    taken = tuple(inputs)
    dense = max((each.width for each in taken if each.kind == "dense"), default=0)
    model = Scored(recommender, objective, taken, tower, dense)
    program = _export(model, taken)
    read = tuple(each for each, is_read in zip(taken, _reads(program), strict=True) if is_read)
    if read != taken:
        model = Scored(recommender, objective, read, tower, dense)
        program = _export(model, read)
    return Program(program, read, model)


def _export(model: nn.Module, inputs: tuple[Input, ...]) -> ExportedProgram:
    rows = Dim("rows", min=1)
    examples = tuple(example(each, EXAMPLE_ROWS) for each in inputs)
    shapes = tuple({0: rows} for _ in inputs)
    try:
        with torch.no_grad():
            return export(model.eval(), examples, dynamic_shapes=(shapes,), strict=False)
    except RaytrecError:
        raise
    except Exception as error:  # torch's own have no base in common
        raise ConfigError(
            f"torch cannot export the model: {first_line(error)}",
            where=_place(error),
            expected="operations whose shapes follow from those of the inputs, for any number of rows",
            do="take x.shape[0] for len(x), and torch.where for a branch on values",
        ) from error


def _place(error: Exception) -> str:
    """The line of the model that an error comes from."""
    own = os.path.dirname(torch.__file__), __file__
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((each for each in reversed(frames) if not each.filename.startswith(own)), frames[-1])
    return f"{frame.filename}, line {frame.lineno}: {frame.line}"


def _reads(program: ExportedProgram) -> Iterator[bool]:
    """Whether each input of a user's is read, and not only asked for its number of rows."""
    program.graph.eliminate_dead_code()
    read = {
        node.name: any(user.target is not torch.ops.aten.sym_size.int for user in node.users)
        for node in program.graph.nodes
        if node.op == "placeholder"
    }
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            yield read[spec.arg.name]


class Scored(nn.Module):
    """Tensors of inputs → predictions of each task, or one tower's vectors; see make_program.

    Args:
        dense: how many dense columns the model takes, if it reads them or not.
    """

    def __init__(
        self,
        recommender: Recommender,
        objective: Objective,
        inputs: tuple[Input, ...],
        tower: TowerName | None,
        dense: int,
    ):
        super().__init__()
        self.model, self._call = recommender.model, recommender.call
        self._objective, self._inputs, self._tower, self._dense = objective, inputs, tower, dense

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._tower:
            tower = getattr(self.model, self._tower)
            return (last_vectors(self._call.run(tower, *self._given(tensors))),)
        return tuple(self._objective.predictions(self.logits(tensors)).values())

    def logits(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of the rows, as Objective takes them."""
        return self._call.run(self.model, *self._given(tensors))

    def _given(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        """(dense columns of the rows, inputs by feature)."""
        dense = tensors[0].new_zeros(tensors[0].shape[0], self._dense)  # len() would make a constant of it
        features: dict[str, Any] = {}
        for given, tensor in zip(self._inputs, tensors, strict=True):
            if given.kind == "dense":
                dense = tensor
            elif given.kind == "bag":
                features[given.feature] = tensor
            else:
                whole = features.get(given.feature, IdSequence(None, None))
                features[given.feature] = whole._replace(**{given.kind: tensor})
        return dense, features

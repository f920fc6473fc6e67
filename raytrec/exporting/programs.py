"""Export dense models as torch.export programs, which require only torch, and as ONNX models."""

from __future__ import annotations

import io
import logging
import os
import re
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export, save
from torch.export.graph_signature import InputKind

from raytrec.common.errors import ConfigError, RaytrecError, RunError, get_first_line
from raytrec.common.formatting import format_count
from raytrec.config.tasks import TowerName
from raytrec.models.inputs import Sequence as IdSequence
from raytrec.models.recommender import Recommender, select_last_vectors
from raytrec.scoring.manifest import Input
from raytrec.scoring.program_archive import DisallowedContent, sanitize_archive
from raytrec.scoring.single_rows import make_example_input
from raytrec.tasks.objective import Objective

EXAMPLE_ROWS = 3  # rows of example inputs; with one row, torch would specialize the program to batches of one row
TOLERANCE = 1e-5  # maximum difference of onnxruntime's outputs, relative for values above 1
RANDOM_BATCH_SIZES = (1, 3, 50)  # numbers of random rows for which outputs are compared with onnxruntime
ROW_AXIS = "rows"  # name of the first dimension of all inputs and outputs in ONNX


@dataclass(frozen=True)
class Program:
    """Program exported by torch.export, with its inputs.

    Attributes:
        exported: Program that maps tensors to a tuple of tensors: the predictions of each task, float32 [B]
            or [B, classes], or the vectors of a tower, float32 [B, width].
        inputs: Inputs of the program.
        model: Module from which the program was exported.
    """

    exported: ExportedProgram
    inputs: tuple[Input, ...]
    model: ScoringModule

    def to_pt2_bytes(self) -> bytes:
        """Return the content of a .pt2 file, without example inputs (a pickle) and paths of this machine.

        The example inputs are also removed from `exported`.

        Raises:
            ConfigError: The program contains an operator or other content that is not allowed in exports.
        """
        self.exported.example_inputs = None
        buffer = io.BytesIO()
        save(self.exported, buffer)
        try:
            return sanitize_archive(buffer.getvalue())
        except DisallowedContent as error:
            raise ConfigError(
                f"the exported model contains {error}",
                where="model.name",
                expected="operators and expressions of sizes that raytrec/scoring/operators.py allows",
                do="use other operations in the model; OPERATORS in this file lists the allowed operators",
            ) from error


def make_program(
    recommender: Recommender, objective: Objective, inputs: Collection[Input], tower: TowerName | None = None
) -> Program:
    """Export a recommender's dense model as a program with only those inputs that the model reads.

    Args:
        recommender: Recommender that contains the dense model.
        objective: Objective of the run, which converts logits to predictions.
        inputs: Inputs for all features of the schema.
        tower: Tower whose vectors the program returns; None: the program returns the predictions of all tasks.

    Raises:
        ConfigError: torch cannot export the model.
    """
    all_inputs = tuple(inputs)
    dense = max((each.width for each in all_inputs if each.kind == "dense"), default=0)
    model = ScoringModule(recommender, objective, all_inputs, tower, dense)
    program = _export(model, all_inputs)
    read_inputs = tuple(i for i, read in zip(all_inputs, _detect_read_inputs(program), strict=True) if read)
    if read_inputs != all_inputs:
        model = ScoringModule(recommender, objective, read_inputs, tower, dense)
        program = _export(model, read_inputs)
    return Program(program, read_inputs, model)


def _export(model: nn.Module, inputs: tuple[Input, ...]) -> ExportedProgram:
    rows = Dim("rows", min=1)
    examples = tuple(make_example_input(each, EXAMPLE_ROWS) for each in inputs)
    shapes = tuple({0: rows} for _ in inputs)
    try:
        with torch.no_grad():
            return export(model.eval(), examples, dynamic_shapes=(shapes,), strict=False)
    except RaytrecError:
        raise
    except Exception as error:  # torch's exceptions have no common base
        raise ConfigError(
            f"torch cannot export the model: {get_first_line(error)}",
            where=_find_model_line(error),
            expected="operations whose output shapes depend only on input shapes, for any number of rows",
            do="change the model; common remedies: x.shape[0] for len(x), torch.where for branches on values",
        ) from error


def _find_model_line(error: Exception) -> str:
    """Return the innermost line of an error's traceback, outside of torch and this file if possible, for messages."""
    excluded = os.path.dirname(torch.__file__), __file__
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((each for each in reversed(frames) if not each.filename.startswith(excluded)), frames[-1])
    return f"{frame.filename}, line {frame.lineno}: {frame.line}"


def _detect_read_inputs(program: ExportedProgram) -> Iterator[bool]:
    """Yield True for each user input whose values are read, else False. Reading the number of rows does not count."""
    program.graph.eliminate_dead_code()
    read = {
        node.name: any(user.target is not torch.ops.aten.sym_size.int for user in node.users)
        for node in program.graph.nodes
        if node.op == "placeholder"
    }
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            yield read[spec.arg.name]


class ScoringModule(nn.Module):
    """Module that maps input tensors to the predictions of all tasks or to the vectors of one tower.

    Args:
        recommender: Recommender that contains the dense model.
        objective: Objective of the run, which converts logits to predictions.
        inputs: Inputs of the program.
        tower: Tower whose vectors are returned; None: the predictions of all tasks are returned.
        dense: Number of dense columns in the schema, even if the model does not read them.
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
        """Return a tuple with the predictions of each task, or with the vectors of the tower."""
        if self._tower:
            tower = getattr(self.model, self._tower)
            return (select_last_vectors(self._call.run(tower, *self._split_inputs(tensors))),)
        return tuple(self._objective.predictions(self.logits(tensors)).values())

    def logits(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the model's output, float32 [B] or [B, columns], which Objective splits by task."""
        return self._call.run(self.model, *self._split_inputs(tensors))

    def _split_inputs(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return (dense columns, inputs by feature), the arguments of the model's forward."""
        dense = tensors[0].new_zeros(tensors[0].shape[0], self._dense)  # torch.export would trace len() as a constant
        features: dict[str, Any] = {}
        for spec, tensor in zip(self._inputs, tensors, strict=True):
            if spec.kind == "dense":
                dense = tensor
            elif spec.kind == "bag":
                features[spec.feature] = tensor
            else:
                sequence = features.get(spec.feature, IdSequence(None, None))
                features[spec.feature] = sequence._replace(**{spec.kind: tensor})
        return dense, features


def make_onnx(program: Program, outputs: Sequence[str]) -> bytes:
    """Convert a program to ONNX, and return the content of model.onnx. The model accepts any number of rows.

    Inputs are named KIND.FEATURE, or `dense` (`make_input_name`), and have the order of the program's inputs.

    Args:
        program: Program to convert.
        outputs: Names of the outputs.

    Raises:
        ConfigError: Packages are missing, or torch cannot convert the program, for example because
            ONNX lacks an operator.
    """
    try:
        import onnxruntime  # noqa: F401 (to compare with)
        import onnxscript
    except ImportError as error:
        raise ConfigError(
            f"a package for ONNX cannot be imported: {get_first_line(error)}",
            where="--onnx",
            expected="onnx, onnxscript and onnxruntime",
            do="run `pip install --no-deps -r requirements/onnx.txt` (docs/export.md)",
        ) from None
    op: Any = onnxscript.opset18

    def squeeze(self: Any, dim: int) -> Any:
        """Remove a dimension of size 1, and ignore other dimensions as torch does. ONNX's Squeeze rejects them."""
        return op.Squeeze(self, op.Constant(value_ints=[dim])) if self.shape[dim] == 1 else self

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # torch.onnx always warns about torchvision
    buffer = io.BytesIO()
    try:
        onnx_program = torch.onnx.export(
            program.exported,
            input_names=[make_input_name(each) for each in program.inputs],
            output_names=list(outputs),
            dynamo=True,
            verbose=False,
            custom_translation_table={torch.ops.aten.squeeze.dim: squeeze},
        )
        onnx_program.rename_axes({onnx_program.model.graph.inputs[0].shape[0]: ROW_AXIS})
        for node in onnx_program.model.graph:
            node.metadata_props.clear()  # removes lines of code and paths of this machine
        onnx_program.save(buffer)
    except Exception as error:  # torch's exceptions have no common base
        raise ConfigError(
            f"the model cannot be exported to ONNX: {_summarize_error(error)}",
            where="--onnx",
            expected="a model whose operators torch can convert to ONNX",
            do="omit --onnx, or use other operators in the model",
        ) from error
    return buffer.getvalue()


def make_input_name(program_input: Input) -> str:
    """Return the ONNX name of an input, such as dense, bag.user or vectors.history."""
    return f"{program_input.kind}.{program_input.feature}" if program_input.feature else program_input.kind


def _summarize_error(error: BaseException) -> str:
    """Return a message that names the operator that ONNX does not support, or the first line of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", str(error))
    return f"ONNX does not support {missing[1]}" if missing else get_first_line(error)


class ComparedProgram:
    """Program that compares its outputs with the outputs of onnxruntime in every call.

    Args:
        program: Program to run.
        onnx: The same program in ONNX, as returned by `make_onnx`.

    Raises:
        ConfigError: onnxruntime cannot load the model.
    """

    def __init__(self, program: Program, onnx: bytes):
        import onnxruntime

        self._run, self._inputs = program.exported.module(), program.inputs
        try:
            self._session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise ConfigError(
                f"onnxruntime cannot load the model: {_summarize_error(error)}", where="--onnx", do="omit --onnx"
            ) from error

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the program's outputs after comparing them with onnxruntime's outputs.

        Raises:
            RunError: The shape of an output differs, or its values differ by more than TOLERANCE.
        """
        names = [make_input_name(each) for each in self._inputs]
        values = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        with torch.no_grad():
            outputs = self._run(*tensors)
        half = TOLERANCE / 2  # absolute and relative tolerance, whose sum is at most TOLERANCE · max(1, |expected|)
        for number, (array, expected) in enumerate(zip(self._session.run(None, values), outputs, strict=True)):
            actual = torch.from_numpy(array)
            if actual.shape != expected.shape:
                found = f"has the shape {list(actual.shape)} instead of {list(expected.shape)}"
            elif not actual.allclose(expected, half, half, equal_nan=True):
                found = f"differs from the model's by {float((actual - expected).abs().max()):.3g}"
            else:
                continue
            raise RunError(
                f"output {number} of onnxruntime {found}",
                where=f"--onnx, a batch of {format_count(len(expected), 'row')}",
                expected=f"the model's outputs within {half:g} · (1 + |output|)",
                do="omit --onnx",
            )
        return outputs

    def compare_random_rows(self) -> None:
        """Compare the outputs of both programs for random rows, in batches of RANDOM_BATCH_SIZES.

        Raises:
            RunError: The outputs differ; see `forward`.
        """
        for rows in RANDOM_BATCH_SIZES:
            self.forward(*(make_example_input(each, rows) for each in self._inputs))

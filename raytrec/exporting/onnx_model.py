"""A program as ONNX, compared with what it was made from."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Sequence
from typing import Any

import torch

from raytrec.common.errors import ConfigError, RunError, first_line
from raytrec.exporting.programs import Program
from raytrec.scoring.late import example
from raytrec.scoring.manifest import Input

TOLERANCE = 1e-5  # of what onnxruntime gives, relative to values above 1
MADE_UP_ROWS = (1, 3, 50)
AXIS = "rows"  # the name of the first dimension of all inputs and outputs


def make_onnx(program: Program, outputs: Sequence[str]) -> bytes:
    """The file model.onnx: inputs KIND.FEATURE (`input_name`) in the program's order, any number of rows.

    Args:
        outputs: their names.

    Raises:
        ConfigError: packages are missing, or ONNX has not all of the program's operators.
    """
    try:
        import onnxruntime  # noqa: F401 (to compare with)
        import onnxscript
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed",
            where="--onnx",
            expected="onnx, onnxscript and onnxruntime",
            do="pip install --no-deps -r requirements/onnx.txt (docs/serving.md)",
        ) from None
    op: Any = onnxscript.opset18

    def squeeze(self: Any, dim: int) -> Any:
        """As torch: a dimension that is not 1 stays, which ONNX's operator refuses."""
        return op.Squeeze(self, op.Constant(value_ints=[dim])) if self.shape[dim] == 1 else self

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, at every call
    into = io.BytesIO()
    try:
        made = torch.onnx.export(
            program.exported,
            input_names=[input_name(each) for each in program.inputs],
            output_names=list(outputs),
            dynamo=True,
            verbose=False,
            custom_translation_table={torch.ops.aten.squeeze.dim: squeeze},
        )
        made.rename_axes({made.model.graph.inputs[0].shape[0]: AXIS})
        for node in made.model.graph:
            node.metadata_props.clear()  # lines of code and paths of this machine
        made.save(into)
    except Exception as error:  # torch's own have no base in common
        raise ConfigError(
            f"the model cannot be exported as ONNX: {_reason(error)}",
            where="--onnx",
            expected="operators that ONNX has",
            do="leave out --onnx, or compute the model with other operators",
        ) from error
    return into.getvalue()


def input_name(of: Input) -> str:
    """What an input is called: dense, bag.user, vectors.history."""
    return f"{of.kind}.{of.feature}" if of.feature else of.kind


def _reason(error: BaseException) -> str:
    """The operator that is missing; else the first line of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", str(error))
    return f"ONNX has no {missing[1]}" if missing else first_line(error)


class ComparedProgram:
    """A program that compares what it gives with onnxruntime's, call by call.

    Args:
        onnx: as `make_onnx` gives it.

    Raises:
        ConfigError: onnxruntime cannot load it.
    """

    def __init__(self, program: Program, onnx: bytes):
        import onnxruntime

        self._run, self._inputs = program.exported.module(), program.inputs
        try:
            self._session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
        except Exception as error:  # its own have no base in common
            raise ConfigError(
                f"onnxruntime cannot load the model: {_reason(error)}", where="--onnx", do="leave out --onnx"
            ) from error

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """
        Raises:
            RunError: they differ by more than TOLERANCE.
        """
        names = [input_name(each) for each in self._inputs]
        values = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        with torch.no_grad():
            found = self._run(*tensors)
        half = TOLERANCE / 2  # both together are at most TOLERANCE · max(1, |expected|)
        for given, expected in zip(self._session.run(None, values), found, strict=True):
            got = torch.from_numpy(given)
            if got.shape != expected.shape or not got.allclose(expected, half, half, equal_nan=True):
                raise RunError(
                    "onnxruntime's scores differ from the model's",
                    where=f"--onnx, {len(expected)} rows",
                    expected=f"at most {TOLERANCE:g} of difference",
                    do="leave out --onnx",
                )
        return found

    def try_made_up_rows(self) -> None:
        """Compares rows that are drawn, several numbers of them.

        Raises:
            RunError: they differ.
        """
        for rows in MADE_UP_ROWS:
            self.forward(*(example(each, rows) for each in self._inputs))

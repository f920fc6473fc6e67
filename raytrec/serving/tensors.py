"""Decode the tensors of inference requests, in JSON or in binary, and convert them to a table of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pyarrow import types
from pydantic import BaseModel, ConfigDict, Field

from raytrec.common.errors import DataError, get_first_line
from raytrec.data.arrow import is_list, value_type
from raytrec.scoring.matrices import DENSE_MATRIX, ID_MATRIX, ROWS_PLACE
from raytrec.scoring.request_rows import to_array

LENGTHS = ".lengths"  # suffix of the tensor with the lengths of the lists in another tensor
INTEGERS = [f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]
ARROW_TYPES = {name: pa.type_for_alias(name.lower()) for name in ("BOOL", *INTEGERS)}
ARROW_TYPES |= {"FP16": pa.float16(), "FP32": pa.float32(), "FP64": pa.float64(), "BYTES": pa.string()}
DATATYPES = {kind: name for name, kind in ARROW_TYPES.items()}


class Message(BaseModel):
    """JSON object of the protocol; additional keys are ignored."""

    model_config = ConfigDict(strict=True)


class Parameters(Message):
    """Parameters of a request, an input or an output; additional parameters are ignored."""

    binary_data_size: int | None = Field(None, ge=0)
    binary_data: bool | None = None
    binary_data_output: bool = False


class InputTensor(Message):
    """Input tensor; `data` is None if the values follow the JSON in binary (binary_data_size bytes)."""

    name: str
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1, max_length=2)
    datatype: str
    parameters: Parameters = Parameters()
    data: list[Any] | None = None


Tensor = tuple[np.ndarray | pa.Array, list[int]]  # values in row-major order, and shape (one or two dimensions)


def read_tensors(inputs: Iterable[InputTensor], binary: memoryview, columns: pa.Schema) -> dict[str, Tensor]:
    """Return the tensors of a request by name.

    Args:
        inputs: Descriptions of the tensors.
        binary: Binary values of the tensors, one tensor after the other.
        columns: Columns of the model's data, which determine the types of times.

    Raises:
        DataError: The values of a tensor do not match its description, a name occurs twice, or bytes are left over.
    """
    tensors: dict[str, Tensor] = {}
    for entry in inputs:
        size = entry.parameters.binary_data_size
        try:
            if entry.name in tensors:
                raise ValueError("the name occurs twice")
            if entry.datatype not in ARROW_TYPES:
                raise ValueError(f"the datatype '{entry.datatype}' is not one of {', '.join(ARROW_TYPES)}")
            if (size is None) == (entry.data is None) or (size or 0) > len(binary):
                raise ValueError("the body does not contain the values once, as data or as binary_data_size bytes")
            kind, place = ARROW_TYPES[entry.datatype], columns.get_field_index(entry.name)
            if entry.datatype == "BYTES" and place >= 0:  # times are text, as in JSON
                kind = element if types.is_temporal(element := value_type(columns.field(place).type)) else kind
            # A copy of binary values is aligned for NumPy and Arrow.
            parts = _flatten(entry.data, entry.shape) if size is None else bytes(binary[:size])
            values = _from_bytes(parts, kind) if isinstance(parts, bytes) else to_array(parts, kind)
            nulls = values.null_count if isinstance(values, pa.Array) else 0
            if nulls:
                raise ValueError("the protocol does not support null")
            if len(values) != math.prod(entry.shape):
                raise ValueError(f"there are {len(values):,} values")
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            what, expected = get_first_line(error), f"values for {entry.shape} of type {entry.datatype}"
            raise DataError(what, where=f"input {entry.name}", expected=expected) from None
        tensors[entry.name], binary = (values, entry.shape), binary[size or 0 :]
    if len(binary):
        raise DataError(f"{len(binary):,} bytes follow the tensors", where="the body", expected="no other bytes")
    return tensors


def _flatten(data: list[Any], shape: list[int]) -> list[Any]:
    """Flatten the values of a tensor if they are nested rows of its shape. Other lists are refused later."""
    is_nested = len(shape) == 2 and all(isinstance(row, list) and len(row) == shape[1] for row in data)
    return list(chain.from_iterable(data)) if is_nested else data


def _from_bytes(data: bytes, kind: pa.DataType) -> np.ndarray | pa.Array:
    """Decode binary booleans of one byte, little-endian numbers, or strings, each after its length in 4 bytes."""
    if kind == pa.bool_():
        return np.frombuffer(data, np.uint8).astype(bool)
    if not types.is_string(kind) and not types.is_temporal(kind):
        return np.frombuffer(data, kind.to_pandas_dtype())
    texts, place = [], 0
    while place < len(data):
        start, place = place + 4, place + 4 + int.from_bytes(data[place : place + 4], "little")
        texts.append(data[start:place].decode())
    if place > len(data):
        raise ValueError("the last text is incomplete")
    return to_array(texts, kind)


def to_table(tensors: Mapping[str, Tensor], columns: pa.Schema) -> pa.Table:
    """Return rows with a column for each tensor that has the name of a column or of a matrix.

    A tensor [B] becomes a column of values, as does [B, 1] unless the model's column has lists. A tensor [B, L]
    becomes a column of lists. If there is a tensor NAME.lengths, integers [B], the tensor NAME [N] contains the
    values of B lists of these lengths.

    Raises:
        DataError: The numbers of rows differ, or lengths do not match the values.
    """
    arrays, places = {}, {name: columns.get_field_index(name) for name in tensors}
    for name, (array, shape) in tensors.items():
        values = pa.array(array) if isinstance(array, np.ndarray) else array
        lengths, _ = tensors.get(name + LENGTHS, (None, None))
        if places[name] < 0 and name not in (DENSE_MATRIX, ID_MATRIX):
            continue
        if lengths is not None and places[name + LENGTHS] < 0:
            lengths_B = np.asarray(lengths)
            is_valid = lengths_B.dtype.kind in "iu" and ((lengths_B >= 0) & (lengths_B <= len(values))).all()
            if not is_valid or lengths_B.sum() != len(values):
                expected = f"nonnegative integers that add up to {len(values):,}"
                raise DataError(
                    "the lengths do not match the values", where=f"input {name}{LENGTHS}", expected=expected
                )
            offsets = np.concatenate([[0], np.cumsum(lengths_B)]).astype(np.int32)
            arrays[name] = pa.ListArray.from_arrays(offsets, values)
        elif len(shape) == 1 or (shape[1] == 1 and (places[name] < 0 or not is_list(columns.field(name).type))):
            arrays[name] = values
        else:
            arrays[name] = pa.Array.from_buffers(pa.list_(values.type, shape[1]), shape[0], [None], children=[values])
    if len({len(array) for array in arrays.values()}) > 1:
        raise DataError("the inputs have different numbers of rows", where=ROWS_PLACE, expected="equal numbers")
    return pa.table(arrays)

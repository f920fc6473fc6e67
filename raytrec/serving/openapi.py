"""The service's OpenAPI document, of the columns that a model takes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyarrow import types
from pydantic_core import to_json

from raytrec.data.arrow import list_element
from raytrec.scoring.scorer import Scorer
from raytrec.serving.bodies import ARROW, JSON

ERRORS = {
    "400": "A body, column or value that does not fit; names field and reason.",
    "401": "No token, or another.",
    "413": "More bytes, rows or ids than are taken.",
    "429": "Too many rows wait; Retry-After has seconds.",
}


def describe(scorer: Scorer) -> dict[str, Any]:
    """The document as plain values."""
    manifest = scorer.manifest
    row = {"type": "object", "properties": {field.name: _type(field.type) for field in scorer.columns}}
    rows = {"type": "array", "items": row}
    lists = {field.name: {"type": "array", "items": _type(field.type)} for field in scorer.columns}
    body = {
        "oneOf": [
            _object(rows=rows),
            _object(columns={"type": "object", "properties": lists}),
            _object(user=row, candidates=rows),
        ]
    }
    example = {"rows": example_rows(scorer)}
    paths = {"/predict": _post("Predictions of rows, or of one user's candidates.", body, example)}
    if manifest.towers:
        tower = {"name": "tower", "in": "query", "schema": {"enum": ["query", "item"]}}
        paths["/vectors"] = _post("Vectors of rows.", _object(rows=rows), None) | {"parameters": [tower]}
    return {
        "openapi": "3.1.0",
        "info": {"title": manifest.source.run, "version": manifest.version},
        "paths": {path: {"post": operation} for path, operation in paths.items()},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
    }


def example_rows(scorer: Scorer, count: int = 1) -> list[dict[str, Any]]:
    """Rows to try: golden ones, else made up ones."""
    if len(scorer.golden):
        return scorer.golden.select(scorer.columns.names).slice(0, count).to_pylist()
    return [{field.name: _value(field.type) for field in scorer.columns}]


def example_text(scorer: Scorer) -> str:
    """A body of /predict to try, a column a line."""
    (row,) = example_rows(scorer)
    columns = (f"{_json(name)}: {_json(value)}" for name, value in row.items())
    return '{"rows": [{\n  ' + ",\n  ".join(columns) + "\n}]}\n"


def _json(value: Any) -> str:
    return to_json(value, inf_nan_mode="null").decode()


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _post(summary: str, body: dict[str, Any], example: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        JSON: {"schema": body},
        ARROW: {"schema": {"type": "string", "format": "binary"}},
    }
    if example is not None:
        content[JSON]["example"] = example
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "Version and columns."}}
        | {status: {"description": text} for status, text in ERRORS.items()},
    }


def _type(kind: pa.DataType) -> dict[str, Any]:
    inner = list_element(kind)
    if inner is not None:
        return {"type": ["array", "null"], "items": _type(inner)}
    name = "string"
    if types.is_integer(kind):
        name = "integer"
    elif types.is_floating(kind):
        name = "number"
    elif types.is_boolean(kind):
        name = "boolean"
    return {"type": [name, "null"]}


def _value(kind: pa.DataType) -> Any:
    if list_element(kind) is not None:
        return []
    return 0 if types.is_integer(kind) or types.is_floating(kind) else None

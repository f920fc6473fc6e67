"""Description of a service: endpoints, the OpenAPI document with the model's columns, and the page."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import yaml
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pyarrow import types
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from raytrec.data.arrow import list_element_type
from raytrec.scoring.scorer import Scorer
from raytrec.serving.bodies import JSON

JSON_TYPES = (types.is_integer, "integer"), (types.is_floating, "number"), (types.is_boolean, "boolean")


class Endpoint(NamedTuple):
    """HTTP method and path of a service, described in templates/openapi.yaml.

    Attributes:
        method: HTTP method.
        path: Path of the URL.
        answer: Function (request, model that serves the request) → response.
        is_open: True if no token is required.
    """

    method: str
    path: str
    answer: Callable[[Request, Scorer], Awaitable[Response]]
    is_open: bool = False


def describe(scorer: Scorer, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI document of a service with its model's columns and tasks; /vectors only if it has towers."""
    document = yaml.safe_load((Path(__file__).parent / "templates/openapi.yaml").read_text(encoding="utf-8"))
    manifest, paths, schemas = scorer.manifest, document["paths"], document["components"]["schemas"]
    document["info"] = {"title": manifest.source.run, "version": scorer.version}
    kinds = {field.name: _type(_to_sent_type(field.type)) for field in scorer.columns}
    schemas["Row"]["properties"] = kinds
    schemas["Columns"]["properties"] = {name: {"type": "array", "items": kind} for name, kind in kinds.items()}
    values = schemas["Values"], schemas["ValuesOfClasses"]
    schemas["Predictions"]["properties"] = {task.column: values[task.classes > 1] for task in manifest.tasks}
    paths["/predict"]["post"]["requestBody"]["content"][JSON]["example"] = {"rows": make_example_rows(scorer)}
    served = (each.path for each in endpoints if each.path != "/vectors" or manifest.towers)
    return document | {"paths": {path: paths[path] for path in served}}


def make_example_rows(scorer: Scorer) -> list[dict[str, Any]]:
    """Return [row]: the first golden row, or if there is none, a row of zeros, empty lists and nulls."""
    if len(scorer.golden):
        columns = scorer.golden.select(scorer.columns.names).slice(0, 1)
        return columns.cast(pa.schema([(f.name, _to_sent_type(f.type)) for f in columns.schema])).to_pylist()
    return [{field.name: _value(_to_sent_type(field.type)) for field in scorer.columns}]


def make_example_text(scorer: Scorer) -> str:
    """Return an example body of /predict as JSON text, with one column per line."""
    (row,) = make_example_rows(scorer)
    columns = (f"{_json(name)}: {_json(value)}" for name, value in row.items())
    return '{"rows": [{\n  ' + ",\n  ".join(columns) + "\n}]}\n"


def _json(value: Any) -> str:
    return to_json(value, inf_nan_mode="null").decode()


def _to_sent_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's values in JSON: int64 for durations, also in lists; otherwise `kind`."""
    inner = list_element_type(kind)
    if inner is not None:
        return pa.list_(_to_sent_type(inner))
    return pa.int64() if types.is_duration(kind) else kind


def _type(kind: pa.DataType) -> dict[str, Any]:
    inner = list_element_type(kind)
    if inner is not None:
        return {"type": ["array", "null"], "items": _type(inner)}
    name = next((name for is_type, name in JSON_TYPES if is_type(kind)), "string")
    return {"type": [name, "null"]}


def _value(kind: pa.DataType) -> Any:
    if list_element_type(kind) is not None:
        return []
    return 0 if types.is_integer(kind) or types.is_floating(kind) else None


@cache
def make_page() -> tuple[str, dict[str, str]]:
    """Return the HTML page, which contains no data, and its headers.

    The headers allow only the inline script and style and requests to this service, and forbid embedding the page in
    another page.
    """
    loader = ChoiceLoader([PackageLoader("raytrec.serving"), PackageLoader("raytrec.report")])
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    style = "\n" + pages.get_template("style.css").render() + "\n" + pages.get_template("page.css").render()
    script = "\n" + pages.get_template("page.js").render()
    html = pages.get_template("page.html.j2").render(style=Markup(style), script=Markup(script))
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html, {
        "Content-Security-Policy": "; ".join(f"{what} {allowed}" for what, allowed in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"

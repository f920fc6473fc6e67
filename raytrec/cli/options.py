"""Command options, built from parameters and docstrings, and options shared by several commands."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

if TYPE_CHECKING:
    from raytrec.driver.console import Result

# Entry in the Args or Options section of a docstring; the option's metavar may be in parentheses after its name.
ENTRY = re.compile(r"^    (\w+)(?: \((.+?)\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)

_CONFIG_HELP = "Path or URI of the configuration."
Config = Annotated[str | None, typer.Argument(metavar="[CONFIG]", help=_CONFIG_HELP)]
RequiredConfig = Annotated[str, typer.Argument(metavar="CONFIG", help=_CONFIG_HELP)]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder or checkpoint folder.")]
RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Changes to the configuration.")
]
Job = Annotated[str | None, typer.Argument(metavar="[JOB]", help="Job id, as printed by `raytrec submit`.")]
Address = Annotated[
    str | None,
    typer.Option(
        help="http://HOST:PORT of the cluster's dashboard; default: RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265."
    ),
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", help="Allow code (module:name) and servers in a config from a URI, a run, or an export."
    ),
]
Workers = Annotated[int | None, typer.Option(help="Number of workers; default: as in training.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change to the configuration, such as data.on_error=skip or tables.NAME.out_of_range=hash (repeatable).",
    ),
]
Checkpoint = Annotated[
    str | None, typer.Option(metavar="STEP|best", help="Checkpoint of a run; default: the newest one.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def with_options(
    command: Callable[..., None], shared: Mapping[str, ParameterInfo] | None = None
) -> Callable[..., None]:
    """Return a command whose parameters are typer arguments and options.

    A parameter is an option, unless its annotation contains an Argument. Its help and metavar come from the entry
    `name (METAVAR): help` in the docstring's Args or Options section, or from the annotation. A bool that is False
    by default becomes a flag without a --no- form.

    Args:
        command: Function with a docstring.
        shared: Parameter name → Option, for parameters without an Option in their annotation.
    """
    text, *more = re.split(r"\n(?:Args|Options):\n", inspect.getdoc(command) or "", maxsplit=1)
    described = {name: (metavar, " ".join(words.split())) for name, metavar, words in ENTRY.findall("".join(more))}
    hints = get_type_hints(command, include_extras=True)

    def run(**values: Any) -> None:
        command(**values)

    def to_option(parameter: inspect.Parameter) -> inspect.Parameter:
        name, hint = parameter.name, hints.get(parameter.name, str)
        kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else [hint]
        flags = [f"--{name.replace('_', '-')}"] if kind is bool and parameter.default is False else []
        infos = [part for part in metadata if isinstance(part, ParameterInfo)]
        info = copy((*infos, (shared or {}).get(name) or typer.Option(*flags))[0])
        metavar, words = described.get(name, ("", ""))
        info.metavar, info.help = info.metavar or metavar or None, words or info.help
        return parameter.replace(annotation=Annotated[kind, info], kind=parameter.KEYWORD_ONLY)

    parameters = [to_option(each) for each in inspect.signature(command).parameters.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = text.strip()
    return run


def call_and_print(function: Callable[..., Result], options: dict[str, Any]) -> None:
    """Call a function with the options of a command, the first by position, and print the result (see print_result)."""
    as_json, place = options.pop("json"), options.pop(next(iter(options)))
    print_result(function(place, **options), as_json)


def print_result(result: Result, as_json: bool) -> None:
    """Print the result of a command as JSON or as a table."""
    from raytrec.driver.console import print_summary

    if as_json:
        print_json(result.metrics)
    else:
        print_summary(result)


def print_json(metrics: dict[str, Any]) -> None:
    """Print metrics as one line of JSON."""
    print(json.dumps(metrics))

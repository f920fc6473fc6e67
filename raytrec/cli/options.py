"""Options of several commands; prints results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from raytrec.driver.console import Summary

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder or checkpoint folder.")]
RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Overrides.")]
Job = Annotated[
    str | None,
    typer.Argument(metavar="[JOB]", help="Job id, as printed by `raytrec submit`; default: the newest."),
]
Address = Annotated[
    str | None,
    typer.Option(help="http://HOST:PORT of the cluster's dashboard; default: http://127.0.0.1:8265."),
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", help="Allow code (module:name) named by a config from a URI, run or checkpoint."
    ),
]
Workers = Annotated[int | None, typer.Option(help="Workers; default: as in training.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="For example data.on_error=skip or tables.NAME.out_of_range=hash (repeatable).",
    ),
]
Checkpoint = Annotated[
    str | None, typer.Option(metavar="STEP|best", help="Which checkpoint of a run; default: the newest.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def show(result: Summary, as_json: bool) -> None:
    """Prints the result of a command: as JSON, or as a table."""
    from raytrec.driver.console import print_summary

    if as_json:
        print_json(result.metrics)
    else:
        print_summary(result)


def print_json(metrics: dict[str, Any]) -> None:
    """Prints figures as one line of JSON."""
    print(json.dumps(metrics))

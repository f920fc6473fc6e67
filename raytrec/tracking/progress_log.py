"""A run in its job's log: lines and JSON messages.

Lines are for people, messages for programs that follow the job.

movielens-20261122-101500  step 120/550 (22%)  80,000 rows/s  NE 0.9101  log loss 0.5123  ETA 0:42
{"raytrec": "train", "step": 120, "rows_per_s": 80000.4, "ne": 0.9101, "logloss": 0.5123}
movielens-20261122-101500  step 550: AUC 0.7885  NE 0.8093  log loss 0.5534  calibration 0.9992

`raytrec follow` shows the lines for people alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import isnan
from typing import IO, Any

from pydantic import with_config
from typing_extensions import TypedDict

from raytrec.cluster.session import in_job
from raytrec.common.documents import typed
from raytrec.common.errors import ErrorParts
from raytrec.common.formatting import null_nonfinite, number
from raytrec.common.messages import Count
from raytrec.common.reading import NotReadable, json_values
from raytrec.metrics.selection import LOG_LOSS, LOSS, Figure

GAP = "  "  # between the parts of a line
MARK = '{"raytrec": '  # how a message begins
# Kinds of messages: the run's folder ({"folder": …}), the figures of a result, the parts of an error.
FOLDER, RESULT, ERROR = "folder", "result", "error"


class InFolder(TypedDict):
    """The values of a message of kind FOLDER."""

    folder: str


@with_config({"extra": "allow"})
class AtStep(TypedDict):
    """The values of a message of kind start, train or eval."""

    step: Count


KINDS: dict[str, Any] = {
    FOLDER: InFolder,
    RESULT: dict[str, Any],
    ERROR: ErrorParts,
    **dict.fromkeys(("start", "train", "eval"), AtStep),
}


def progress(step: int, total: int, rows_per_s: float | None, values: Iterable[str]) -> str:
    """How far training has got; `values` of figures are named (`named`)."""
    parts = [f"step {step}/{total} ({100 * step // max(1, total)}%)"]
    parts += [f"{rows_per_s:,.0f} rows/s"] if rows_per_s else []
    return GAP.join([*parts, *values])


def remaining(seconds: float) -> str:
    """The time that is left: ETA 0:42, ETA 1:02:03."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    minutes, rest = divmod(rest, 60)
    return f"ETA {hours}:{minutes:02}:{rest:02}" if hours else f"ETA {minutes}:{rest:02}"


def evaluation(step: int, values: Iterable[str]) -> str:
    """The figures of an evaluation."""
    return f"step {step}: {GAP.join(values) or 'no figure is defined'}"


def named(figures: Iterable[Figure], values: Mapping[str, Any]) -> list[str]:
    """Return the figures that are defined among some values, each with its label: "NE 0.9101".

    A training loss that reads like the log loss of the same task is left out.
    """
    known = {each.key: each for each in figures if not isnan(number(values.get(each.key)))}
    texts = {key: each.format.format(values[key]) for key, each in known.items()}
    losses = [key for key in texts if key.split(".")[-1] == LOSS]
    repeated = {key for key in losses if texts[key] == texts.get(f"{key.removesuffix(LOSS)}{LOG_LOSS}")}
    return [f"{known[key].label} {text}" for key, text in texts.items() if key not in repeated]


def message(kind: str, values: Mapping[str, Any]) -> str:
    """A message as one line of JSON; what is not finite is null."""
    finite = null_nonfinite(values)
    return json.dumps({"raytrec": kind, **finite})


def write_message(kind: str, values: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Write a message if this process is the driver of a job.

    Args:
        file: Stream to write to; default: stdout.
    """
    if in_job():
        print(message(kind, values), file=file, flush=True)


def parse(line: str) -> tuple[str, dict[str, Any]] | None:
    """The message that a line of a log is: its kind (KINDS) and its values; None for any other line."""
    if not line.startswith(MARK):
        return None
    try:
        values = typed(json_values(line), dict[str, Any])
        kind = values.pop("raytrec")
        return kind, dict(typed(values, KINDS[kind]))
    except (NotReadable, KeyError, TypeError):  # TypeError: a kind that cannot be a key
        return None


def for_people(log: str) -> list[str]:
    """The lines of a log, each with its end, without its messages."""
    return [line for line in log.splitlines(keepends=True) if not line.startswith(MARK)]

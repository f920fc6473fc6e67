"""Log of a job: text lines for users, and JSON messages for programs that follow the job.

movielens-20261122-101500  step 120/550 (22%)  80,000 rows/s  NE 0.9101  log loss 0.5123  ETA 0:42
{"raytrec": "train", "step": 120, "rows_per_s": 80000.4, "ne": 0.9101, "logloss": 0.5123}
movielens-20261122-101500  step 550: AUC 0.7885  NE 0.8093  log loss 0.5534  calibration 0.9992

`raytrec follow` shows only the text lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import isnan
from typing import IO, Any

from pydantic import with_config
from typing_extensions import TypedDict

from raytrec.cluster.session import is_job_driver
from raytrec.common.documents import validate_as
from raytrec.common.errors import ErrorParts
from raytrec.common.formatting import null_nonfinite, parse_number
from raytrec.common.messages import Count
from raytrec.common.reading import UnreadableError, parse_json
from raytrec.metrics.selection import LOG_LOSS, LOSS, MetricDisplay

PART_SEPARATOR = "  "  # separator between the parts of a line
MARK = '{"raytrec": '  # prefix of messages
# Further kinds of messages: the path of the run folder, the values of a result, and the parts of an error.
FOLDER, RESULT, ERROR = "folder", "result", "error"


class FolderMessage(TypedDict):
    """Values of a message of the kind FOLDER."""

    folder: str


@with_config({"extra": "allow"})
class StepMessage(TypedDict):
    """Values of a message of the kind start, train or eval."""

    step: Count


KINDS: dict[str, Any] = {
    FOLDER: FolderMessage,
    RESULT: dict[str, Any],
    ERROR: ErrorParts,
    **dict.fromkeys(("start", "train", "eval"), StepMessage),
}


def progress(step: int, total: int, rows_per_s: float | None, values: Iterable[str]) -> str:
    """Return the progress of training as text.

    Args:
        step: Number of completed steps.
        total: Number of steps in the complete run.
        rows_per_s: Rows per second; omitted from the text if None or 0.
        values: Labeled values from `named` and `remaining`.
    """
    parts = [f"step {step}/{total} ({100 * step // max(1, total)}%)"]
    parts += [f"{rows_per_s:,.0f} rows/s"] if rows_per_s else []
    return PART_SEPARATOR.join([*parts, *values])


def remaining(seconds: float) -> str:
    """Return the remaining seconds as text, such as "ETA 0:42" or "ETA 1:02:03"."""
    hours, secs = divmod(max(0, round(seconds)), 3600)
    minutes, secs = divmod(secs, 60)
    return f"ETA {hours}:{minutes:02}:{secs:02}" if hours else f"ETA {minutes}:{secs:02}"


def evaluation(step: int, values: Iterable[str]) -> str:
    """Return the result of an evaluation after `step` steps as text; `values` are labeled values from `named`."""
    return f"step {step}: {PART_SEPARATOR.join(values) or 'no metric is defined'}"


def named(figures: Iterable[MetricDisplay], values: Mapping[str, Any]) -> list[str]:
    """Return a text for each metric with a defined value: label and value, such as "NE 0.9101".

    A training loss is omitted if its text equals the text of the same task's log loss.

    Args:
        figures: Display properties of the metrics, in the order of the result.
        values: Metric key → value; a missing key or a value that is not a finite number means undefined.
    """
    defined = {each.key: each for each in figures if not isnan(parse_number(values.get(each.key)))}
    texts = {key: each.format.format(values[key]) for key, each in defined.items()}
    losses = [key for key in texts if key.split(".")[-1] == LOSS]
    repeated = {key for key in losses if texts[key] == texts.get(f"{key.removesuffix(LOSS)}{LOG_LOSS}")}
    return [f"{defined[key].label} {text}" for key, text in texts.items() if key not in repeated]


def message(kind: str, values: Mapping[str, Any]) -> str:
    """Return a message of a kind (see KINDS) as one line of JSON; top-level numbers that are not finite become null."""
    return json.dumps({"raytrec": kind, **null_nonfinite(values)})


def write_message(kind: str, values: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Write a message to `file` (default: stdout) if this process is the driver of a job."""
    if is_job_driver():
        print(message(kind, values), file=file, flush=True)


def parse(line: str) -> tuple[str, dict[str, Any]] | None:
    """Return the kind (see KINDS) and the values of the message in a log line.

    The result is None if the line is not a message, or is a message of an unknown kind or with invalid values.
    """
    if not line.startswith(MARK):
        return None
    try:
        values = validate_as(parse_json(line), dict[str, Any])
        kind = values.pop("raytrec")
        return kind, dict(validate_as(values, KINDS[kind]))
    except (UnreadableError, KeyError, TypeError):  # TypeError: the kind is not hashable
        return None


def strip_messages(log: str) -> list[str]:
    """Return the lines of a log that do not begin with MARK; line ends are kept."""
    return [line for line in log.splitlines(keepends=True) if not line.startswith(MARK)]

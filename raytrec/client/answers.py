"""An answer of the cluster as a line of a job's log: Ray's Job API has no other way back.

    python -m raytrec.client.answers '["news", "NAME", {}]'     # in a job: calls a function of peek

No pickle: JSON, in which bytes and arrays are text.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from typing import Any

import numpy as np

from raytrec.common.errors import RaytrecError, RunError

MARK = "raytrec-answer "


def encode(value: Any) -> str:
    """A value as one line of text."""
    text = json.dumps(value, default=_as_json)
    return MARK + base64.b64encode(zlib.compress(text.encode())).decode()


def decode(line: str) -> Any:
    """The value of such a line."""
    text = zlib.decompress(base64.b64decode(line.strip().removeprefix(MARK)))
    return json.loads(text, object_hook=_from_json)


def answer_in(log: str) -> Any:
    """The answer that a job has written.

    Raises:
        RunError: the error that it has met with, or there is no answer in its log.
    """
    lines = [line for line in log.splitlines() if line.startswith(MARK)]
    if not lines:
        last = [line for line in log.splitlines() if line.strip()][-3:]
        raise RunError("the cluster gave no answer", where=" | ".join(last) or "an empty log")
    answer = decode(lines[-1])
    if "error" in answer:
        raise RunError(**answer["error"])
    return answer["value"]


def main(question: str) -> None:
    """Calls a function of peek and prints what it gives, or the parts of its error."""
    from raytrec.client.queries import CALLS

    name, *arguments = json.loads(question)
    try:
        answer = {"value": CALLS[name](*arguments)}
    except RaytrecError as error:
        answer = {"error": error.parts}
    sys.stdout.write(f"\n{encode(answer)}\n")  # at once: stderr goes to the same log
    sys.stdout.flush()


def _as_json(value: Any) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return {
            "$array": base64.b64encode(value.tobytes()).decode(),
            "shape": value.shape,
            "of": value.dtype.str,
        }
    raise TypeError(f"{type(value).__name__} cannot be an answer")


def _from_json(value: dict[str, Any]) -> Any:
    if "$bytes" in value:
        return base64.b64decode(value["$bytes"])
    if "$array" in value:
        return np.frombuffer(base64.b64decode(value["$array"]), value["of"]).reshape(value["shape"])
    return value


if __name__ == "__main__":
    main(sys.argv[1])

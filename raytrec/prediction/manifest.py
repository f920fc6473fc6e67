"""Which predictions a folder holds (_predictions.json). No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from raytrec.common.errors import ConfigError, os_errors
from raytrec.common.reading import NotReadable, json_values
from raytrec.common.storage import open_filesystem
from raytrec.prediction.folder import MANIFEST, PredictionFolder

PREDICTIONS_FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a folder holds predictions of; `_predictions.json`.

    Attributes:
        run: its name. checkpoint: its folder. checkpoint_id: hash of its index.
        scores: names of the columns of scores. columns: of those that are carried.
        data: where the input is. input: stands for what its files hold.
        rules: table → out_of_range.
        vectors: of which tower these are vectors, query or item; None: they are scores.
    """

    run: str
    checkpoint: str
    checkpoint_id: str
    scores: list[str]
    columns: list[str]
    data: str
    input: str
    rules: dict[str, str]
    vectors: str | None = None

    @property
    def binding(self) -> str:
        """Stands for all that a file's content depends on."""
        tower = [self.vectors] if self.vectors else []
        return _hash([self.checkpoint_id, self.scores, self.columns, self.input, *tower])

    def plan(self, batch_rows: int, span_rows: int) -> str:
        """Stands for all that a part's content depends on."""
        return _hash([self.binding, self.rules, batch_rows, span_rows])[:16]

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps({"format": PREDICTIONS_FORMAT, **self.__dict__}, indent=2) + "\n"

    def difference(self, before: Manifest) -> tuple[str, str] | None:
        """(how a folder that another manifest stands in differs, what to do); None: it is of the same.

        A table's rule may have been `error`: what is complete held no id that it would have changed.
        """
        if before.checkpoint_id != self.checkpoint_id:
            of = f"of {before.checkpoint}"
            return f"this folder holds predictions {of}", f"predict with that checkpoint, or {OTHER}"
        if before.vectors != self.vectors:
            what = f"vectors of the {before.vectors} tower" if before.vectors else "scores"
            return f"this folder holds {what}", OTHER
        for key, what in {"columns": "--columns", "scores": "tasks"}.items():
            if (names := getattr(before, key)) != getattr(self, key):
                return (
                    f"this folder holds predictions with other {what}: {', '.join(names or ['none'])}",
                    f"give the same, or {OTHER}",
                )
        if before.input != self.input:
            what = f"this folder holds predictions of other rows, from {before.data}"
            if before.data == self.data:
                what = "the input's files have changed since predictions were written here"
            return what, f"predict all of it again, into a new folder: {OTHER}"
        rules = before.rules
        changed = [name for name, rule in self.rules.items() if rules.get(name, rule) not in (rule, "error")]
        if changed:
            rule = f"tables.{changed[0]}.out_of_range={rules[changed[0]]}"
            return f"this folder holds predictions with {rule}", f"give the same, or {OTHER}"
        return None


OTHER = "choose another --out, or remove the folder yourself"


def check_place(out: str, data: str) -> str:
    """Whether predictions can go where they shall; gives the folder that names of input files are taken from.

    Raises:
        ConfigError: what is written would be, or become, input.
    """
    filesystem, source = open_filesystem(data)
    is_file = filesystem.get_file_info(source).is_file
    below = source.rpartition("/")[0] if is_file else source
    prefix = data.partition("://")[0] + "://" if "://" in data else ""
    _, target = open_filesystem(out)
    if ("://" in out) != ("://" in data):
        return prefix + below
    if filesystem.type_name == "local":
        inside = Path(os.path.realpath(target)).is_relative_to(os.path.realpath(below))
        inside &= not is_file or os.path.realpath(target) == os.path.realpath(below)
    else:
        inside = f"{target}/".startswith(f"{below}/") and (not is_file or target == below)
    if inside:
        raise ConfigError(
            "the predictions would be written among their input",
            where=f"--out {out}, --data {data}",
            expected="a folder outside of the data",
            do="choose another --out",
        )
    return prefix + below


def claim(folder: PredictionFolder, manifest: Manifest) -> set[str]:
    """Makes a folder that of these predictions, or finds that it is; the names of its files.

    Raises:
        ConfigError: it holds something else. RunError: it cannot be read or written.
    """
    where = f"--out {folder.uri}"
    share = "a folder that all nodes can write to"
    with os_errors("the folder cannot be read or written", where=where, expected=share):
        names, text = folder.names(), folder.read(MANIFEST)
        if text is None and (others := sorted(n for n in names if not n.startswith(MANIFEST))):
            raise ConfigError(
                f"this folder holds other files, such as {others[0]}",
                where=where,
                expected="a new folder, or one that `raytrec predict` has begun to fill",
                do="choose another --out",
            )
        before = None if text is None else _read(text, folder)
        if before is not None and (found := manifest.difference(before)):
            what, do = found
            raise ConfigError(what, where=where, expected="the same predictions", do=do)
        folder.sweep()
        if before != manifest:
            folder.write(MANIFEST, manifest.to_json().encode())
    return names


def _read(text: bytes, folder: PredictionFolder) -> Manifest:
    try:
        values = json_values(text)
        if isinstance(values, dict) and values.get("format") == PREDICTIONS_FORMAT:
            return TypeAdapter(Manifest).validate_python(values)
        why = "of another format"
    except NotReadable as error:
        why = str(error)
    except ValidationError as error:
        why = ", ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    raise ConfigError(f"{MANIFEST} cannot be read: {why}", where=f"--out {folder.uri}", do=OTHER)


def split_names(asked: Sequence[str]) -> list[str]:
    """The names of --columns, of which each has one or several with commas."""
    return [name.strip() for each in asked for name in each.split(",") if name.strip()]


def choose_columns(asked: Sequence[str] | None, carry: Sequence[str], scores: Sequence[str]) -> list[str]:
    """The columns that are carried.

    Args:
        asked: --columns, each one name or several with commas; None: those of data.reserve_columns.

    Raises:
        ConfigError: one is named twice, or like a column of scores.
    """
    names = list(carry) if asked is None else split_names(asked)
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"column '{min(twice)}' is named twice", where="--columns", expected="each once")
    if taken := set(names) & set(scores):
        raise ConfigError(
            f"the column '{min(taken)}' would have the name of a column of scores",
            where="--columns",
            expected=f"other names than {', '.join(scores)}",
            do="rename the column in the input, or the task",
        )
    return names


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

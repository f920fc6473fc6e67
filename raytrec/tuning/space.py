"""The space of a search: keys of a configuration, and how each trial's value is drawn.

optim.embeddings.lr: {log_uniform: [0.001, 0.1]}
model.dropout: {uniform: [0, 0.5]}
model.cross_layers: {integer: [1, 4]}            # both ends included
data.global_batch_size: {choice: [512, 1024]}
tasks.bought.weight: {uniform: [0.1, 1]}         # of the task of that name
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import exp, isfinite, log, prod
from random import Random
from typing import Any

import yaml

from raytrec.common.errors import ConfigError, did_you_mean, some
from raytrec.common.reading import NotReadable, yaml_values
from raytrec.common.storage import read_text

KINDS = ("uniform", "log_uniform", "integer", "choice")
# What all trials have in common, so that their figures can be compared and their files are apart.
COMMON = (
    *("run.name", "run.dir", "run.root", "data.valid", "data.test", "tracking", "checkpoint.dir"),
    *("scaling.address", "train.eval_every_steps"),
)
MOST_LISTED = 100_000  # configurations of a finite space that are put in an order, rather than drawn
DIGITS = 4  # that count, of a number that is drawn


@dataclass(frozen=True)
class Draw:
    """How the values of one key are drawn.

    Attributes:
        kind: one of KINDS.
        values: the two ends; of a choice, what there is to choose from.
        line: of the file, from 1.
    """

    key: str
    kind: str
    values: tuple[Any, ...]
    line: int

    def one(self, random: Random) -> Any:
        """A value; numbers have DIGITS digits that count, and are not beyond the ends."""
        if self.kind == "choice":
            return deepcopy(random.choice(self.values))
        low, high = self.values
        if self.kind == "integer":
            return random.randint(low, high)
        if self.kind == "uniform":
            value = random.uniform(low, high)
        else:
            value = exp(random.uniform(log(low), log(high)))
        return min(max(float(f"{value:.{DIGITS}g}"), low), high)

    @property
    def all(self) -> list[Any] | None:
        """Every value that there is; None where there are too many."""
        if self.kind == "choice":
            return list(self.values)
        if self.kind == "integer" and self.values[1] - self.values[0] < MOST_LISTED:
            return list(range(self.values[0], self.values[1] + 1))
        return None


@dataclass(frozen=True)
class Space:
    """The keys that are searched.

    Attributes:
        place: the file.
        text: as it was written.
    """

    place: str
    text: str
    draws: tuple[Draw, ...]

    @classmethod
    def read(cls, place: str) -> Space:
        """Reads a file, local or s3:// or gs://.

        Raises:
            ConfigError: there is none, or as in `parse`.
        """
        try:
            return cls.parse(read_text(place), place)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise ConfigError("there is no such file", where=place, expected=_EXPECTED) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the space: {error}", where=place) from None

    @classmethod
    def parse(cls, text: str, place: str) -> Space:
        """
        Raises:
            ConfigError: what is wrong, with its key and line.
        """
        try:
            values = yaml_values(text)
        except NotReadable as error:
            raise ConfigError(f"not YAML that can be used: {error}", where=place) from None
        if not isinstance(values, dict) or not values:
            raise ConfigError("the space has no keys", where=place, expected=_EXPECTED)
        lines = {key.value: key.start_mark.line + 1 for key, _ in yaml.compose(text).value}
        draws = tuple(_draw(str(key), how, place, lines.get(str(key), 1)) for key, how in values.items())
        for draw in draws:
            _check_key(draw, draws, place)
        return cls(place, text, draws)

    def where(self, draw: Draw) -> str:
        """The place of a key, for errors."""
        return _where(self.place, draw.line)

    @property
    def size(self) -> int | None:
        """How many configurations there are; None where they are not worth counting."""
        several = [draw.all for draw in self.draws]
        if any(each is None for each in several) or prod(map(len, several)) > MOST_LISTED:
            return None
        return prod(map(len, several))

    def configurations(self, trials: int, seed: int) -> list[dict[str, Any]]:
        """Key → value of each trial: the same of one seed, whatever the number of trials.

        No configuration of a space that is small enough to list comes twice; there may be fewer than trials.
        """
        if self.size is None:
            return [
                {draw.key: draw.one(Random(f"{seed}/{number}/{draw.key}")) for draw in self.draws}
                for number in range(trials)
            ]
        everything = list(product(*(draw.all for draw in self.draws)))
        Random(seed).shuffle(everything)
        keys = [draw.key for draw in self.draws]
        return [dict(zip(keys, deepcopy(values), strict=True)) for values in everything[:trials]]

    def extremes(self) -> Iterator[tuple[Draw, Any]]:
        """Each key with its ends, or all of its choices: what a configuration has to take."""
        for draw in self.draws:
            for value in draw.values:
                yield draw, value


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets section.key of a configuration's plain values, or tasks.NAME.key.

    Raises:
        ConfigError: a part of the key leads nowhere.
    """
    *path, last = key.split(".")
    for part in path:
        if isinstance(values, list):
            values = _named(values, part, key)
            continue
        if values.get(part) is None:
            values[part] = {}
        values = values[part]
        if not isinstance(values, (dict, list)):
            raise ConfigError(f"'{part}' is a value, not a section", where=key)
    if isinstance(values, list):
        raise ConfigError("a list has no keys", where=key, expected="tasks.NAME.KEY, or tasks as a whole")
    values[last] = deepcopy(value)


def _named(values: list, name: str, key: str) -> dict[str, Any]:
    """The entry of a list, such as tasks, that is called so; a task without a name has that of its label."""
    entries = [each for each in values if isinstance(each, dict)]
    names = [str(each.get("name") or each.get("label")) for each in entries]
    if name not in names:
        near = did_you_mean(name, names)
        raise ConfigError(
            f"there is no '{name}'" + (f"; did you mean {near}?" if near else ""),
            where=key,
            expected=f"one of {', '.join(names)}",
        )
    return entries[names.index(name)]


_EXPECTED = "lines such as optim.dense.lr: {log_uniform: [0.0001, 0.01]}"


def _where(place: str, line: int) -> str:
    return f"{place}, line {line}"


def _draw(key: str, how: Any, place: str, line: int) -> Draw:
    if not isinstance(how, Mapping) or len(how) != 1:
        raise ConfigError(
            f"{key}: {some(how)} does not say how it is drawn", where=_where(place, line), expected=_EXPECTED
        )
    ((kind, values),) = how.items()
    if kind not in KINDS:
        near = did_you_mean(str(kind), list(KINDS))
        raise ConfigError(
            f"{key}: there is no way to draw '{kind}'" + (f"; did you mean {near}?" if near else ""),
            where=_where(place, line),
            expected=f"one of {', '.join(KINDS)}",
        )
    values = _choices(values) if kind == "choice" else _ends(kind, values)
    if isinstance(values, str):
        raise ConfigError(f"{key}: {kind} {values}", where=_where(place, line), expected=_EXAMPLES[kind])
    return Draw(key, kind, values, line)


_EXAMPLES = {
    "uniform": "two numbers, the lower first: {uniform: [0, 0.5]}",
    "log_uniform": "two numbers above 0, the lower first: {log_uniform: [0.001, 0.1]}",
    "integer": "two whole numbers, the lower first: {integer: [1, 4]}",
    "choice": "a list of different values: {choice: [512, 1024]}",
}


def _choices(values: Any) -> tuple[Any, ...] | str:
    """What there is to choose from; else what is wrong with it."""
    if not isinstance(values, list) or not values:
        return f"has {some(values)}"
    if twice := [v for i, v in enumerate(values) if any(v == w and type(v) is type(w) for w in values[:i])]:
        return f"has {some(twice[0])} twice"
    return tuple(values)


def _ends(kind: str, values: Any) -> tuple[Any, ...] | str:
    """The two ends of a range; else what is wrong with them."""
    if not isinstance(values, list) or len(values) != 2:
        return f"has {some(values)}"
    ends = tuple(_number(value, whole=kind == "integer") for value in values)
    if any(end is None for end in ends):
        return f"has {some(values)}"
    if ends[0] >= ends[1]:
        return f"has {some(values)}, whose first is not the lower one"
    if kind == "log_uniform" and ends[0] <= 0:
        return f"has {some(values)}, and no power of a number is {ends[0]:g}"
    return ends


def _number(value: Any, *, whole: bool) -> int | float | None:
    """A number, also one that YAML 1.1 takes for text (1e-3); None for anything else."""
    if isinstance(value, bool):
        return None
    if whole:
        return value if isinstance(value, int) else None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if isfinite(number) else None


def _check_key(draw: Draw, draws: tuple[Draw, ...], place: str) -> None:
    """
    Raises:
        ConfigError: all trials have this key in common, or it is inside another one that is drawn.
    """
    parts = f"{draw.key}."
    if draw.key in {"run", "data", "checkpoint", "scaling", "train"} or parts.startswith(
        tuple(f"{common}." for common in COMMON)
    ):
        raise ConfigError(
            f"{draw.key} cannot be searched",
            where=_where(place, draw.line),
            expected="a key that trials may differ in",
            do=f"set it in the configuration; common to all trials are {', '.join(COMMON)}",
        )
    if around := [each for each in draws if each is not draw and parts.startswith(f"{each.key}.")]:
        raise ConfigError(
            f"{draw.key} is a part of {around[0].key}, which is drawn in line {around[0].line}",
            where=_where(place, draw.line),
            expected="keys that are no parts of one another",
        )

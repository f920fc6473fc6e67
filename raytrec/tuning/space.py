"""Search space, which defines the keys to draw and the distributions of their values.

Example of a file:

optim.embeddings.lr: {log_uniform: [0.001, 0.1]}
model.dropout: {uniform: [0, 0.5]}
model.cross_layers: {integer: [1, 4]}            # both ends included
data.global_batch_size: {choice: [512, 1024]}
tasks.bought.weight: {uniform: [0.1, 1]}         # weight of the task named bought
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import exp, log, prod
from random import Random
from typing import Any

import yaml
from pydantic import ConfigDict, StrictInt, TypeAdapter, ValidationError

from raytrec.common.errors import ConfigError, convert_os_errors, make_unknown_word_error, shorten_repr
from raytrec.common.reading import UnreadableError, parse_yaml
from raytrec.common.storage import read_bytes
from raytrec.config.base import Mark, Number
from raytrec.config.overrides import apply_override, to_override_texts
from raytrec.config.run_config import RunConfig, list_keys_with
from raytrec.config.trust import find_foreign_code, find_origin, refuse_code

# Kind → expected syntax.
DRAW_KINDS = {
    "uniform": "two numbers, the lower first: {uniform: [0, 0.5]}",
    "log_uniform": "two numbers above 0, the lower first: {log_uniform: [0.001, 0.1]}",
    "integer": "two whole numbers, the lower first: {integer: [1, 4]}",
    "choice": "a list of different values: {choice: [512, 1024]}",
}
EXPECTED = "lines such as optim.dense.lr: {log_uniform: [0.0001, 0.01]}"
COMMON = list_keys_with(Mark.COMMON)
# Accepts numbers that YAML 1.1 parses as text (1e-3), but neither booleans nor infinite numbers.
RANGE_ADAPTER = TypeAdapter(tuple[Number, Number], config=ConfigDict(allow_inf_nan=False))
INTEGER_RANGE_ADAPTER = TypeAdapter(tuple[StrictInt, StrictInt])
# Largest finite space whose configurations are listed and shuffled instead of drawn.
MAX_LISTED_CONFIGURATIONS = 100_000
DIGITS = 4  # number of significant digits in a drawn number


@dataclass(frozen=True)
class Draw:
    """Distribution of the values of one key.

    Attributes:
        key: Configuration key.
        kind: One of DRAW_KINDS.
        values: Lower and upper end of a range, or the values of a choice.
        where: File and line of the definition, for messages.
    """

    key: str
    kind: str
    values: tuple[Any, ...]
    where: str

    def sample(self, random: Random) -> Any:
        """Return a random value; floats are rounded to DIGITS significant digits and stay in the range."""
        if self.kind == "choice":
            return random.choice(self.values)
        low, high = self.values
        if self.kind == "integer":
            return random.randint(low, high)
        is_log = self.kind == "log_uniform"
        value = exp(random.uniform(log(low), log(high))) if is_log else random.uniform(low, high)
        return min(max(float(f"{value:.{DIGITS}g}"), low), high)

    @property
    def listed(self) -> tuple[Any, ...] | range | None:
        """Return all possible values; None for a continuous distribution, or an integer range of too many values."""
        if self.kind == "choice":
            return self.values
        low, high = self.values
        return range(low, high + 1) if self.kind == "integer" and high - low < MAX_LISTED_CONFIGURATIONS else None


@dataclass(frozen=True)
class Space:
    """Search space: the keys to draw and their distributions.

    Attributes:
        place: Path or URI of the space's file.
        text: Content of the file.
        draws: Distribution of each key.
    """

    place: str
    text: str
    draws: tuple[Draw, ...]

    @classmethod
    def read(cls, place: str) -> Space:
        """Read a space from a local file or an s3:// or gs:// URI.

        Raises:
            ConfigError: The file cannot be read or is invalid.
            DataError: The path is not valid, or the store cannot be reached.
        """
        with convert_os_errors("cannot read the search space", ConfigError, where=place, expected=EXPECTED):
            data = read_bytes(place)
        return cls.parse(data.decode(errors="surrogateescape"), place)  # parse rejects the surrogates

    @classmethod
    def parse(cls, text: str, place: str) -> Space:
        """Parse a space from YAML.

        Raises:
            ConfigError: The text is invalid; the error names the key and the line unless the YAML itself is invalid.
        """
        try:
            values = parse_yaml(text)
        except UnreadableError as error:
            raise ConfigError(f"cannot parse the YAML of the search space: {error}", where=place) from None
        if not isinstance(values, dict) or not values:
            what = "is not a mapping of keys" if values else "has no keys"
            raise ConfigError(f"the search space {what}", where=place, expected=EXPECTED)
        lines = {key.value: key.start_mark.line + 1 for key, _ in yaml.compose(text).value}
        draws = [_draw(str(k), how, f"{place}, line {lines.get(str(k), 1)}") for k, how in values.items()]
        for draw in draws:
            _check_key(draw, draws)
        return cls(place, text, tuple(draws))

    def configurations(self, trials: int, seed: int) -> list[dict[str, Any]]:
        """Return the drawn values of each trial, as a mapping from key to value.

        With the same seed, a larger number of trials only adds trials. If the space contains at most
        MAX_LISTED_CONFIGURATIONS configurations, each is drawn at most once, so the result may have fewer than
        `trials` entries.
        """
        listed = [draw.listed for draw in self.draws]
        if any(each is None for each in listed) or prod(map(len, listed)) > MAX_LISTED_CONFIGURATIONS:
            return [
                {draw.key: draw.sample(Random(f"{seed}/{number}/{draw.key}")) for draw in self.draws}
                for number in range(trials)
            ]
        combinations = list(product(*listed))
        Random(seed).shuffle(combinations)
        keys = [draw.key for draw in self.draws]
        return [dict(zip(keys, values, strict=True)) for values in combinations[:trials]]

    @property
    def extremes(self) -> list[tuple[Draw, Any]]:
        """Return (distribution, value) for both ends of each range and for each value of a choice.

        The configuration must be valid with each of these values.
        """
        return [(draw, value) for draw in self.draws for value in draw.values]

    def check_training_data(self, config: RunConfig) -> None:
        """Check that the training data is not drawn if trials are compared on rows held out of data.train.

        Raises:
            ConfigError: data.train or data.partitions is drawn, and trials would be compared on different rows.
        """
        draws = [draw for draw in self.draws if f"{draw.key}.".startswith(("data.train.", "data.partitions."))]
        is_held_out = config.data.holdout or config.train.eval_every_steps == "next_folder"
        if draws and is_held_out and not config.data.valid:
            data = "data.valid, and train.eval_every_steps to a number" if not config.data.holdout else "data.valid"
            raise ConfigError(
                f"{draws[0].key} cannot be searched: trials would be compared on different rows of data.train",
                where=draws[0].where,
                expected="the same evaluation rows for all trials",
                do=f"set {data}, or remove this key from the search space",
            )

    def refuse_code(self, config: RunConfig) -> None:
        """Refuse code that a space from a URI or another user's search draws and that `config` does not name.

        Raises:
            ConfigError: The space draws such code, which the error lists, or a key that does not exist.
        """
        if elsewhere := find_origin(self.place):
            allowed = find_foreign_code(config.get_changed_values()).items()
            for draw, value in self.extremes:
                changed = config.get_changed_values()  # these values may be invalid
                (override,) = to_override_texts({draw.key: value})
                apply_override(changed, override, RunConfig.model_fields)
                refuse_code(dict(find_foreign_code(changed).items() - allowed), changed, elsewhere)


def _draw(key: str, spec: Any, where: str) -> Draw:
    if not isinstance(spec, dict) or len(spec) != 1:
        raise ConfigError(f"{key}: {shorten_repr(spec)} is not a distribution", where=where, expected=EXPECTED)
    ((kind, values),) = spec.items()
    if kind not in DRAW_KINDS:
        raise make_unknown_word_error(f"{key}: unknown distribution '{kind}'", str(kind), DRAW_KINDS, where)
    try:
        parsed = _parse_choices(values) if kind == "choice" else _ends(kind, values)
    except ValueError as error:
        what = f"{key}: {kind} {error} (got {shorten_repr(values)})"
        raise ConfigError(what, where=where, expected=DRAW_KINDS[kind]) from None
    return Draw(key, kind, parsed, where)


def _parse_choices(values: Any) -> tuple[Any, ...]:
    choices = tuple(values) if isinstance(values, list) else ()
    if not choices:
        raise ValueError("requires a list of values")
    if any(v == w and type(v) is type(w) for i, v in enumerate(choices) for w in choices[:i]):
        raise ValueError("contains a duplicate value")
    return choices


def _ends(kind: str, values: Any) -> tuple[Any, ...]:
    """Return the lower and upper end of a range; raise ValueError with a reason if they are invalid."""
    try:
        low, high = (INTEGER_RANGE_ADAPTER if kind == "integer" else RANGE_ADAPTER).validate_python(values)
    except ValidationError:
        raise ValueError(f"requires two {'whole' if kind == 'integer' else 'finite'} numbers") from None
    if low >= high:
        raise ValueError("requires two different numbers, the lower first")
    if kind == "log_uniform" and low <= 0:
        raise ValueError("requires a lower bound above 0")
    return low, high


def _check_key(draw: Draw, draws: list[Draw]) -> None:
    """Check that a key may be drawn.

    Raises:
        ConfigError: The key contains, is or belongs to a key that all trials must share, or is part of a drawn key.
    """
    parts = f"{draw.key}."
    fixed = [key for key in COMMON if parts.startswith(f"{key}.") or f"{key}.".startswith(parts)]
    if fixed:
        raise ConfigError(
            f"{draw.key} cannot be searched, because {fixed[0]} must be the same in all trials",
            where=draw.where,
            expected=f"keys that neither contain nor belong to {', '.join(COMMON)}",
            do=f"set {fixed[0]} in the configuration",
        )
    if enclosing := [each for each in draws if each is not draw and parts.startswith(f"{each.key}.")]:
        raise ConfigError(
            f"{draw.key} is part of {enclosing[0].key}, which is drawn in {enclosing[0].where}",
            where=draw.where,
            expected="keys that do not contain each other",
        )

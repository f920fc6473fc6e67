"""The registry of live checks. A new one is a file in this folder and its setting in config/training.py.

    @check("replicas")
    class Replicas(Check):
        do = "resume from the last checkpoint"

        def evaluate(self, position, probed):
            ...

Your own needs no more than its file: `checks.custom: {module:Class: stop}`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from raytrec.checks.live.outcome import Check
from raytrec.common.errors import ConfigError
from raytrec.common.registry import Registry
from raytrec.config.run_config import RunConfig
from raytrec.config.training import ChecksSection

CHECKS: Registry[type[Check]] = Registry("check", __package__)
WHERE = "checks.custom"
T = TypeVar("T", bound="type[Check]")


def check(name: str) -> Callable[[T], T]:
    """Decorator: names a check, in the configuration (`checks.NAME`) and in what it reports."""

    def register(cls: Any) -> Any:
        cls.name = name
        return CHECKS(name)(cls)

    return register


@dataclass(frozen=True)
class Chosen:
    """A check of a run.

    Attributes:
        reaction: to a failure: warn or stop.
        lenient: what in the configuration lets a run continue where it fails.
    """

    check: type[Check]
    reaction: str
    lenient: str


def all_checks() -> list[type[Check]]:
    """raytrec's own, in the order of their settings: what explains others comes first."""
    settings = list(ChecksSection.model_fields)
    return [CHECKS.parts[name] for name in sorted(CHECKS.parts, key=settings.index)]


def choose(config: RunConfig) -> dict[str, Chosen]:
    """The checks that are not off, by name: raytrec's own, then those of checks.custom.

    Raises:
        ConfigError: a check of checks.custom is not there, is not a check, or has the name of another.
    """
    chosen = {
        c.name: Chosen(c, getattr(config.checks, c.name), f"checks.{c.name}=warn") for c in all_checks()
    }
    for path, reaction in config.checks.custom.items():
        if reaction == "off":
            continue
        found = CHECKS.find(path, WHERE)
        if not (isinstance(found, type) and issubclass(found, Check) and found.name):
            raise ConfigError(
                f"{path} is not a check",
                where=WHERE,
                expected="a class with @check(NAME), derived from Check",
            )
        if found.name in chosen:
            other = chosen[found.name].check
            raise ConfigError(
                f"two checks are called {found.name}: {path} and {other.__module__}:{other.__qualname__}",
                where=WHERE,
                do="give one of them another name",
            )
        chosen[found.name] = Chosen(found, reaction, f"{WHERE}: {{{path}: warn}}")
    return {name: one for name, one in chosen.items() if one.reaction != "off"}

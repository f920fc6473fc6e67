"""Live checks: their registry, and what a run calls at the start, after probed steps, before checkpoints.

A new check is a file in this folder and its setting in config/training.py:

    @check("replicas")
    class Replicas(Check):
        do = "resume from the last checkpoint"

        def evaluate(self, position, probed):
            ...

Your own needs no more than its file: `checks.custom: {module:Class: stop}`. A run evaluates them so:

    checks = LiveChecks(CheckedRun(config, schema, state.tables, state.dense, taps, device))
    outcomes = checks.evaluate(START, Position(0, about={"config": …, "versions": …}))
    taps.probing = checks.probes
    checks.prepare(next_batch)
    …                                         # the step
    outcomes = checks.evaluate(STEP, Position(step, batch_step, expected_rows, figures))
    if error := verdict(outcomes, config): raise error

Every rank calls the same at the same place and gets the same outcomes: they agree by sums and maxima, and
exchange objects only where something is wrong, to name ranks (outcome.Check.evaluate).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from raytrec.checks.live.outcome import STEP, Check, CheckedRun, Outcome, Position
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.registry import Registry
from raytrec.config.run_config import RunConfig
from raytrec.config.training import ChecksSection
from raytrec.data.batch import Batch

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


class LiveChecks:
    """The checks of a run that are not off and have something to check; every method is a collective.

    Attributes:
        probes: True if a check needs the steps to be probed after which it is evaluated.
    """

    def __init__(self, run: CheckedRun):
        self._peers = run.peers
        self._checks = [c.check(run) for c in choose(run.config).values() if c.check.applies(run)]
        self.probes = any(check.probes for check in self._checks)

    def __len__(self) -> int:
        return len(self._checks)

    def prepare(self, batch: Batch) -> None:
        """Before a probed step.

        Args:
            batch: this rank's part of that step's batch, in CPU memory.
        """
        for check in self._checks:
            check.prepare(batch)

    def evaluate(self, moment: str, position: Position) -> list[Outcome]:
        """Evaluate the checks of a moment; return their outcomes, the same on all ranks.

        Args:
            moment: START (before the first step), STEP (after a step that `prepare` came before) or
                CHECKPOINT (before one is written, so that a broken state never replaces a whole one).
        """
        checks = [check for check in self._checks if moment in check.moments]
        if not checks:
            return []
        first = int(self._peers.stack(torch.tensor(position.step))[0])
        return [replace(check.evaluate(position, moment == STEP), step=first) for check in checks]


def verdict(outcomes: list[Outcome], config: RunConfig) -> RunError | None:
    """The error that ends the run where a failed check is set to stop it; None to continue."""
    bad = [outcome for outcome in outcomes if not outcome.passed]
    chosen = choose(config) if bad else {}
    bad = [outcome for outcome in bad if chosen[outcome.check].reaction == "stop"]
    if not bad:
        return None
    names = list(dict.fromkeys(o.check for o in bad))
    first = chosen[names[0]]
    do = first.check.do.replace("RUN", config.run.dir or "RUN")
    do = do.replace("LOWER", f"{config.optim.embeddings.lr / 10:g}")
    return RunError(
        f"a check failed: {'. '.join(o.text for o in bad)}",
        where=f"step {bad[0].step}, {' and '.join(names)}",
        expected="all ranks together compute what one process would",
        do=f"{do}. {first.lenient} continues regardless",
    )

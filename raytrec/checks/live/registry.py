"""Registry of live checks, which run at the start, after probed steps and before checkpoints.

To add a check, add a file to this folder, and a setting to config/training.py:

    @check("replicas")
    class Replicas(Check):
        do = "resume the run: raytrec train --resume RUN"

        def evaluate(self, position, probed):
            ...

A user's check needs only its own file, and the setting `checks.custom: {module:Class: stop}`. A run evaluates
checks as follows:

    checks = LiveChecks(CheckedRun(config, schema, state.tables, state.dense, taps, device))
    outcomes = checks.evaluate(START, Position(0, about={"config": …, "versions": …}))
    taps.is_probing = True
    checks.prepare(next_batch)
    …                                         # the step
    outcomes = checks.evaluate(STEP, Position(step, batch_step, expected_rows, figures))
    if error := make_stop_error(outcomes, config): raise error

Every rank makes the same calls in the same order and gets the same outcomes. Ranks agree through sums and
maxima of tensors. They exchange objects only after a failure, to name ranks (outcome.Check.evaluate).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from raytrec.checks.live.outcome import STEP, Check, CheckedRun, Outcome, Position
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.registry import Registry
from raytrec.common.storage import quote_for_shell
from raytrec.config.run_config import RunConfig
from raytrec.config.training import ChecksSection
from raytrec.data.batch import Batch

CHECKS: Registry[type[Check]] = Registry("check", __package__)
CUSTOM_CHECKS_KEY = "checks.custom"
T = TypeVar("T", bound="type[Check]")


def check(name: str) -> Callable[[T], T]:
    """Return a decorator that sets the name of a check class, and registers raytrec's own checks under this name.

    Reports use this name, as does the configuration of raytrec's own checks (`checks.NAME`). The decorator raises a
    ValueError if another check of raytrec has this name.
    """

    def register(cls: Any) -> Any:
        cls.name = name
        return CHECKS(name)(cls)

    return register


@dataclass(frozen=True)
class EnabledCheck:
    """Check that is enabled in a run's configuration.

    Attributes:
        check: Class of the check.
        reaction: Reaction to a failure: warn or stop.
        warn_setting: Setting that lets a run continue after a failure.
    """

    check: type[Check]
    reaction: str
    warn_setting: str


def list_builtin_checks() -> list[type[Check]]:
    """Return raytrec's checks in the order of ChecksSection; checks that explain other failures come first.

    Raises:
        ValueError: A check has no setting in ChecksSection.
    """
    settings = list(ChecksSection.model_fields)
    return [CHECKS.parts[name] for name in sorted(CHECKS.parts, key=settings.index)]


def select_enabled_checks(config: RunConfig) -> dict[str, EnabledCheck]:
    """Return the enabled checks by name: raytrec's checks, then custom checks (checks.custom).

    Custom checks that are off are not imported.

    Raises:
        ConfigError: A custom check cannot be imported, is not a class with @check(NAME) that is derived from
            Check, or has the name of another check of the configuration or of raytrec.
        Exception: Any error raised by a custom check's module during import.
    """
    chosen = {
        c.name: EnabledCheck(c, getattr(config.checks, c.name), f"checks.{c.name}=warn") for c in list_builtin_checks()
    }
    for path, reaction in config.checks.custom.items():
        if reaction == "off":
            continue
        cls = CHECKS.find(path, CUSTOM_CHECKS_KEY)
        if not (isinstance(cls, type) and issubclass(cls, Check) and cls.name):
            raise ConfigError(
                f"{path} is not a check",
                where=CUSTOM_CHECKS_KEY,
                expected="a class with @check(NAME), derived from Check",
            )
        if cls.name in chosen:
            first = chosen[cls.name].check
            raise ConfigError(
                f"two checks have the name {cls.name}: {path} and {first.__module__}:{first.__qualname__}",
                where=CUSTOM_CHECKS_KEY,
                do=f"give {path} another name in @check(NAME), or remove it",
            )
        chosen[cls.name] = EnabledCheck(cls, reaction, f"{CUSTOM_CHECKS_KEY}: {{{path}: warn}}")
    return {name: enabled for name, enabled in chosen.items() if enabled.reaction != "off"}


class LiveChecks:
    """Enabled checks that apply to a run; `prepare` and `evaluate` are collectives.

    The constructor raises errors as `select_enabled_checks`. The length is the number of checks.

    Args:
        run: Run to check.
    """

    def __init__(self, run: CheckedRun):
        self._peers = run.peers
        self._checks = [c.check(run) for c in select_enabled_checks(run.config).values() if c.check.applies(run)]

    def __len__(self) -> int:
        return len(self._checks)

    def prepare(self, batch: Batch) -> None:
        """Prepare the checks for a probed step.

        Args:
            batch: This rank's part of the step's batch, in CPU memory.
        """
        for check in self._checks:
            check.prepare(batch)

    def evaluate(self, moment: str, position: Position) -> list[Outcome]:
        """Evaluate the checks that apply at a moment; return their outcomes, the same on all ranks.

        The step of the outcomes is that of rank 0.

        Args:
            moment: START (before the first step), STEP (after a step that followed `prepare`) or CHECKPOINT
                (before a checkpoint is written, so that a corrupt state does not replace a valid checkpoint).
            position: Position of this rank.
        """
        checks = [check for check in self._checks if moment in check.moments]
        if not checks:
            return []
        first = int(self._peers.stack(torch.tensor(position.step))[0])
        return [replace(check.evaluate(position, moment == STEP), step=first) for check in checks]


def make_stop_error(outcomes: list[Outcome], config: RunConfig) -> RunError | None:
    """Return the error that ends the run if a failed check is set to stop; None if the run continues.

    The error contains the advice of the first such check, and the settings with which all such checks only warn.
    """
    failed = [outcome for outcome in outcomes if not outcome.passed]
    chosen = select_enabled_checks(config) if failed else {}
    failed = [outcome for outcome in failed if chosen[outcome.check].reaction == "stop"]
    if not failed:
        return None
    names = list(dict.fromkeys(o.check for o in failed))
    warn_settings = " and ".join(chosen[name].warn_setting for name in names)
    do = chosen[names[0]].check.do.replace("RUN", quote_for_shell(config.run.dir) if config.run.dir else "RUN")
    do = do.replace("LOWER", f"{config.optim.embeddings.lr / 10:g}")
    return RunError(
        f"{'a check' if len(names) == 1 else f'{len(names)} checks'} failed: {'. '.join(o.text for o in failed)}",
        where=f"step {failed[0].step}, {' and '.join(names)}",
        expected="success of every check that is set to stop",
        do=f"{do}. Set {warn_settings} to continue after a failure",
    )

"""What a search came to: its outcome as JSON, best.yaml, tune.html, and the MLflow parent of its trials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from threading import Thread
from time import time
from typing import Any

import yaml

from raytrec.common.formatting import count
from raytrec.common.reading import NotReadable, json_values, read_bytes
from raytrec.common.storage import relative
from raytrec.config.trust import mark
from raytrec.driver.recorder import RESULT, write_json, write_text
from raytrec.metrics.results import EVAL
from raytrec.metrics.selection import Figure
from raytrec.tracking.store import Store, place_for_artifacts
from raytrec.tracking.translate import NOT_IN_NAMES, Record
from raytrec.tuning.folder import OUTCOME, SPACE
from raytrec.tuning.search import Search
from raytrec.tuning.trials import OVER, Trial, best_config, best_of, ranked

BEST, PAGE, PICTURES = "best.yaml", "tune.html", ("curves.svg", "keys.svg")
PATIENCE_S = 60.0  # with an MLflow server that does not answer


@dataclass(frozen=True)
class Outcome:
    """What a search came to.

    Attributes:
        figure: the metric that trials are compared by.
        trials: all of them, in their order.
        best: the best of those that were trained to their end (where none was, of those that were stopped).
        figures: of the best: eval.NAME of its last evaluation.
        caution: a warning about them; may be empty.
        next_steps: lines that say where to look.
    """

    name: str
    folder: Path
    figure: Figure
    trials: list[Trial]
    best: Trial | None
    figures: dict[str, Any]
    caution: str
    next_steps: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, Any]:
        """As JSON: name, folder, metric (key, direction), best (trial, values, figures, config), trials."""
        best = None
        if self.best:
            best = self.best.record() | {"figures": self.figures, "config": str(self.folder / BEST)}
        return {
            "name": self.name,
            "folder": str(self.folder),
            "metric": {"key": self.figure.key, "better": self.figure.better},
            "best": best,
            "trials": [trial.record() for trial in self.trials],
        }


def outcome_of(search: Search) -> Outcome:
    """What there is by now, also of a search that was interrupted."""
    best = best_of(search.trials, search.figure)
    figures = _figures(best) if best else {}
    outcome = Outcome(
        search.config.run.name, search.folder, search.figure, search.trials, best, figures, search.caution
    )
    outcome.next_steps.append(f"search       {relative(search.folder)}")
    if best:
        outcome.next_steps.append(f"best         raytrec train {relative(search.folder / BEST)}")
    return outcome


def _figures(trial: Trial) -> dict[str, Any]:
    """The figures of a trial's end; of one that was stopped, nothing but the searched metric is of use."""
    try:
        result = json_values(read_bytes(trial.folder / RESULT))
    except (OSError, NotReadable):
        return {}
    return {k: v for k, v in result.items() if k.startswith(EVAL)} if isinstance(result, dict) else {}


def write_outcome(search: Search, outcome: Outcome, warn: Callable[[str], None]) -> None:
    """Writes best.yaml and tune.html; when all trials are over, outcome.json, by which a search has ended.

    Raises:
        OSError: what trials have come to is in their folders; the same search, resumed, writes it again.
    """
    folder = search.folder
    if outcome.best:
        write_text(folder / BEST, best_text(search, outcome))
        mark(folder / BEST)
    try:
        outcome.next_steps.append(f"page         {relative(_write_page(search, outcome))}")
    except Exception as error:  # a search does not fail for its pictures
        warn(f"no {PAGE}: {type(error).__name__}: {error}")
    if all(trial.state in OVER or trial.error for trial in search.trials):
        write_json(folder / OUTCOME, outcome.metrics)
    if search.config.tracking.enabled:
        _write_parent(search, outcome, warn)


def best_text(search: Search, outcome: Outcome) -> str:
    """The best configuration as YAML, with its figures in comments."""
    best, figure = outcome.best, search.figure
    data = "test" if outcome.caution else "validation"
    lines = [
        f"# Trial {best.number} of {outcome.name}, {best.state} at step {best.step}: "
        f"{figure.label} {figure.text(best.value)} on the {data} data.",
        *([f"# Warning: {outcome.caution}."] if outcome.caution else []),
        *(f"# {key}: {value}" for key, value in outcome.figures.items() if not isnan(_number(value))),
        *(f"# {key} = {value}" for key, value in best.values.items()),
    ]
    values = best_config(search.config, best.values)
    return "\n".join(lines) + "\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _summary(outcome: Outcome) -> str:
    states: dict[str, int] = {}
    for trial in outcome.trials:
        states[trial.state] = states.get(trial.state, 0) + 1
    said = ", ".join(f"{number} {state}" for state, number in states.items())
    best = outcome.best
    reached = f" The best is trial {best.number}, with {outcome.figure.text(best.value)}." if best else ""
    return f"{count(len(outcome.trials), 'trial')} compared by {outcome.figure.label}: {said}.{reached}"


def _write_page(search: Search, outcome: Outcome) -> Path:
    """tune.html and its pictures beside it; the path of the page."""
    from markupsafe import Markup

    from raytrec.report.figures.style import alone, to_svg
    from raytrec.report.html import write_page
    from raytrec.tuning.pictures import curves, over_keys

    label, drawn = search.figure.label, []
    pictures = (
        curves(search.trials, search.figure),
        over_keys(search.trials, search.space.draws, search.figure),
    )
    for name, made, what in zip(PICTURES, pictures, ("over steps", "over what was drawn"), strict=True):
        if made:
            svg = to_svg(made, f"{label} {what}")
            (search.folder / name).write_text(alone(svg), encoding="utf-8", errors="replace")
            drawn.append(Markup(svg))
    best = outcome.best
    return write_page(
        search.folder / PAGE,
        "tune.html.j2",
        name=outcome.name,
        folder=str(search.folder.absolute()),
        summary=_summary(outcome),
        caution=outcome.caution,
        trials=_sheet(search, outcome),
        pictures=drawn,
        best=best_text(search, outcome) if best else "",
        space=search.space.text,
    )


def _sheet(search: Search, outcome: Outcome) -> Any:
    from raytrec.report.parts import Cell, Sheet

    keys = [draw.key for draw in search.space.draws]
    rows = [
        [
            Cell(str(trial.number), trial.number),
            Cell(trial.state if not trial.error else f"{trial.state}: {trial.error}"),
            Cell(outcome.figure.text(trial.value), trial.value),
            Cell(f"{trial.step:,}", trial.step),
            *(_cell(trial.values[key]) for key in keys),
        ]
        for trial in ranked(outcome.trials, outcome.figure)
    ]
    return Sheet(["trial", "state", outcome.figure.label, "step", *keys], rows)


def _cell(value: Any) -> Any:
    from raytrec.report.parts import Cell

    sortable = isinstance(value, (int, float)) and not isinstance(value, bool)
    return Cell(str(value), float(value) if sortable else None)


def _write_parent(search: Search, outcome: Outcome, warn: Callable[[str], None]) -> None:
    """The run above the trials in MLflow: the space, the best figures, best.yaml and tune.html.

    A server that does not answer is not waited for: the trials' own records are complete without it.
    """
    failed: list[str] = []

    def write() -> None:
        try:
            _write_to(search, outcome)
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}".splitlines()[0])

    thread = Thread(target=write, name="mlflow", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if thread.is_alive():
        failed.append(f"no answer within {PATIENCE_S:.0f} s")
    if failed:
        warn(f"MLflow lacks the outcome of the search ({failed[0]}); the folder has it: {search.folder}")


def _write_to(search: Search, outcome: Outcome) -> None:
    tracking, folder = search.config.tracking, search.folder
    store = Store(
        tracking.uri,
        tracking.experiment,
        outcome.name,
        place_for_artifacts(tracking.uri, folder),
        key="",
        parent=outcome.name,
    )
    store.load()
    store.open_parent()
    draws = {NOT_IN_NAMES.sub("_", draw.key): draw for draw in search.space.draws}
    store.write_params({f"space.{key}": f"{draw.kind} {list(draw.values)}" for key, draw in draws.items()})
    tags = {"trials": str(len(outcome.trials)), "metric": outcome.figure.key}
    if best := outcome.best:
        tags |= {"best.trial": str(best.number)} | {f"best.{k}": str(v) for k, v in best.values.items()}
        value = {EVAL + outcome.figure.key: best.value} | outcome.figures
        figures = {k: v for k, v in value.items() if not isnan(_number(v))}
        store.write_metrics([Record(figures, best.step, round(time() * 1000))])
    store.write_tags(tags)
    for name in (SPACE, BEST, PAGE, *PICTURES):
        if (folder / name).is_file():
            store.upload(folder / name, "")


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else nan

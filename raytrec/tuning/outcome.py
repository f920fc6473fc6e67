"""The results of a search: files, table, MLflow run."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from threading import Thread
from time import time
from typing import Any

import yaml
from rich.table import Table

from raytrec.common.formatting import number
from raytrec.common.storage import in_shell, relative
from raytrec.common.terminal import bold, open_console, plain
from raytrec.driver.prepare import write_marked
from raytrec.driver.recorder import write_json
from raytrec.metrics.selection import EVAL
from raytrec.tracking.store import Store
from raytrec.tracking.translate import NOT_IN_NAMES, Record
from raytrec.tuning.folder import OUTCOME, SPACE
from raytrec.tuning.search import BEST, OVER, Search, Trial

MLFLOW_PATIENCE_S = 60.0  # with an MLflow server that does not answer


def write_outcome(search: Search, warn: Callable[[str], None]) -> None:
    """Writes best.yaml and the run in MLflow; outcome.json only when all trials have ended.

    Raises:
        OSError: a file cannot be written; the search, resumed, writes it again.
    """
    folder = search.folder
    if search.best:
        write_marked(folder / BEST, best_text(search, search.best))
    if all(trial.state in OVER or trial.error for trial in search.trials):
        write_json(folder / OUTCOME, search.metrics)
    if search.config.tracking.enabled:
        failed = ["no answer within a minute"]
        thread = Thread(target=_write_run, args=(search, failed), name="mlflow", daemon=True)
        thread.start()
        thread.join(MLFLOW_PATIENCE_S)
        if failed:
            warn(f"MLflow lacks the outcome of the search ({failed[-1]}); the folder has it: {folder}")


def best_text(search: Search, best: Trial) -> str:
    """The best configuration, as `raytrec train` takes it, with its figures in comments."""
    data = "test" if search.caution else "validation"
    lines = [
        f"# Trial {best.number} of {search.config.run.name}, {best.state} at step {best.step}: "
        f"{search.value_text(best)} on the {data} data.",
        *([f"# Warning: {search.caution}."] if search.caution else []),
        *(f"# {key}: {value}" for key, value in best.last_figures().items() if not isnan(number(value))),
        *(f"# {key} = {value}" for key, value in best.values.items()),
    ]
    values = search.config.with_(best.values).own_values()
    values["run"] = {key: value for key, value in values["run"].items() if key not in ("name", "dir")}
    values = {section: inner for section, inner in values.items() if inner != {}}
    return "\n".join(lines) + "\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def print_outcome(search: Search) -> None:
    """Prints the trials as a table on stdout, the best first, and where to look next."""
    console = open_console()
    console.print(bold(search.config.run.name), soft_wrap=True)
    table = _table(search, list(search.trials[0].values))
    if console.measure(table, options=console.options.update_width(10_000)).maximum > console.width:
        table = _table(search, [])
    console.print(table)
    lines = [f"warning: {search.caution}"] if search.caution else []
    lines += [f"trial {trial.number} failed: {trial.error}" for trial in search.trials if trial.error]
    lines.append(f"search       {relative(search.folder)}")
    if search.best:
        lines.append(f"best         raytrec train {in_shell(relative(search.folder / BEST))}")
    for line in lines:
        console.print(plain(line), soft_wrap=True)


def _table(search: Search, keys: list[str]) -> Table:
    """The trials, with a column for each key; without keys, with one column for all values."""
    table, figure = Table(), search.figure
    for column in ("trial", figure.label, "step", *keys, "state"):
        table.add_column(plain(column), justify="left" if column == "state" else "right", no_wrap=True)
    if not keys:
        table.add_column("values", overflow="fold")
    for trial in search.ranked:
        cells = [trial.number, figure.text(trial.value), f"{trial.step:,}"]
        cells += [trial.values[key] for key in keys]
        table.add_row(*map(plain, [*cells, trial.state, *([] if keys else [trial.values_text])]))
    return table


def _write_run(search: Search, failed: list[str]) -> None:
    """Writes the run above the trials in MLflow: the space, the best figures and best.yaml.

    Args:
        failed: emptied when all is written; else the reason is added to it.
    """
    folder, store = search.folder, Store(search.config, search.folder)
    draws = {f"space.{NOT_IN_NAMES.sub('_', draw.key)}": draw for draw in search.space.draws}
    tags = {"trials": str(len(search.trials)), "metric": search.figure.key}
    try:
        store.open_parent()
        store.write_params({key: f"{draw.kind} {list(draw.values)}" for key, draw in draws.items()})
        if best := search.best:
            tags |= {"best.trial": str(best.number)} | {f"best.{k}": str(v) for k, v in best.values.items()}
            figures: dict[str, Any] = {EVAL + search.figure.key: best.value} | best.last_figures()
            figures = {key: value for key, value in figures.items() if not isnan(number(value))}
            store.write_metrics([Record(figures, best.step, round(time() * 1000))])
        store.write_tags(tags)
        for file in (SPACE, BEST):
            if (folder / file).is_file():
                store.upload(folder / file, "")
        failed.clear()
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}".splitlines()[0])

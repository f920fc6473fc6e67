"""Files that are written and inspected in one step."""

import shlex

import numpy as np
from any_parquet import write

from raytrec.inspection.propose import inspect


def inspect_columns(folder, columns, labels=None, **settings):
    """Write a file with these columns, and a label if they contain none, and inspect its folder."""
    if labels is None and not {"label", "click"} & {*columns}:
        columns = {"label": np.arange(len(next(iter(columns.values())))) % 2} | columns
    write(folder / "a.parquet", columns, **settings)
    return inspect(str(folder), labels=labels)


def get_findings(found):
    """Return the findings by column name."""
    return {finding.stats.name: finding for finding in found.findings}


def read_shown_settings(found, path, capsys):
    """Show the result and return the settings of the shown train command by key."""
    found.show(str(path))
    command = shlex.split(capsys.readouterr().err.splitlines()[-1])
    assert command[:3] == ["raytrec", "train", "jobs/own.yaml"]
    return dict(word.split("=", 1) for word in command[3:])

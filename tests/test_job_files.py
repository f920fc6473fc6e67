"""Tests that each file in jobs/ runs the raytrec command of the same name."""

import runpy
import sys
from pathlib import Path

import pytest

from raytrec.cli import main

JOBS = sorted((Path(__file__).parent.parent / "jobs").glob("*.py"))


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_job_file_runs_command_of_same_name(job, monkeypatch, capsys):
    said = []
    for arguments in ([job.stem, "--help"], None):
        monkeypatch.setattr(sys, "argv", ["raytrec", "--help"])
        with pytest.raises(SystemExit) as end:
            main(arguments) if arguments else runpy.run_path(str(job), run_name="__main__")
        said.append(" ".join(capsys.readouterr().out.replace(job.name, "raytrec").split()))
        assert not end.value.code
    assert said[0] and said[0] == said[1]

"""Tests that `make smoke` runs a smallest form of every make target."""

import re
from pathlib import Path

import pytest
import smoke

REPO = Path(__file__).parents[1]


def make_targets():
    return set(re.findall(r"(?m)^([a-z][a-z-]*):(?!=)", (REPO / "Makefile").read_text()))


def test_smoke_covers_every_make_target():
    assert make_targets() >= {"train", "test", "chaos"}
    named = {smoke.target_of(name) for name in smoke.TARGETS}
    assert named | set(smoke.NONE) == make_targets()
    assert not named & set(smoke.NONE)


def test_smoke_commands_use_existing_files():
    files = {file for command in smoke.TARGETS.values() for file in re.findall(r"[\w/]+\.py\b", command)}
    assert len(files) > 20
    assert not {file for file in files if not (REPO / file).exists()}


@pytest.mark.parametrize("file", ["README.md", *sorted(p.name for p in (REPO / "docs").glob("*.md"))])
def test_docs_mention_only_existing_make_targets(file):
    path = REPO / file if file == "README.md" else REPO / "docs" / file
    named = re.findall(r"(?m)`make ([a-z][a-z-]*)[^`]*`|^ +make ([a-z][a-z-]*)", path.read_text())
    assert {one or other for one, other in named} <= make_targets()


def test_smoke_commands_do_not_write_results():
    """Smoke commands of benchmarks either write no results or write them to the smoke test's folder."""
    for name, command in smoke.TARGETS.items():
        script = re.search(r"benchmarks/\w+\.py", command)
        if script and "results" in (REPO / script[0]).read_text():
            assert re.search("--smallest|--faults 2 --only|--device cpu", command), name


@pytest.mark.slow
def test_smoke_run_reports_failed_command(tmp_path):
    seconds, done = smoke.run("-c 'print(\"why\"); exit(3)' {folder}", tmp_path)
    assert done.returncode == 3 and "why" in done.stdout and seconds < 60

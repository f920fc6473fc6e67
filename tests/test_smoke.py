"""Every make target has a smallest form that `make smoke` runs."""

import re
from pathlib import Path

import pytest
import smoke

REPO = Path(__file__).parents[1]


def targets():
    return set(re.findall(r"(?m)^([a-z][a-z-]*):(?!=)", (REPO / "Makefile").read_text()))


def test_every_target_has_a_smallest_form():
    assert targets() >= {"train", "test", "chaos"}
    named = {smoke.target_of(name) for name in smoke.TARGETS}
    assert named | set(smoke.NONE) == targets()
    assert not named & set(smoke.NONE)


def test_every_file_of_a_smallest_form_is_there():
    files = {file for command in smoke.TARGETS.values() for file in re.findall(r"[\w/]+\.py\b", command)}
    assert len(files) > 20
    assert not {file for file in files if not (REPO / file).exists()}


@pytest.mark.parametrize("file", ["README.md", *sorted(p.name for p in (REPO / "docs").glob("*.md"))])
def test_documents_name_targets_that_there_are(file):
    path = REPO / file if file == "README.md" else REPO / "docs" / file
    named = re.findall(r"(?m)`make ([a-z][a-z-]*)[^`]*`|^ +make ([a-z][a-z-]*)", path.read_text())
    assert {one or other for one, other in named} <= targets()


def test_no_smallest_form_writes_results():
    """Benchmarks are asked to write nothing, or what they write lies in a folder of the smoke test's own."""
    for name, command in smoke.TARGETS.items():
        script = re.search(r"benchmarks/\w+\.py", command)
        if script and "results" in (REPO / script[0]).read_text():
            assert re.search("--smallest|--faults 2 --only|--device cpu", command), name


def test_a_target_that_fails_is_told(tmp_path):
    seconds, done = smoke.run("-c 'print(\"why\"); exit(3)' {folder}", tmp_path)
    assert done.returncode == 3 and "why" in done.stdout and seconds < 60

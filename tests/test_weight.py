"""Tests that `make weight AGAINST=COMMIT` allows the code growth declared by new CHANGELOG.md entries."""

import subprocess
import sys
from pathlib import Path

import pytest
import weight

REPO = Path(__file__).parents[1]
BEFORE = """# Changelog

- An old feature (budget: +300 code lines).
"""
AFTER = (
    BEFORE
    + """- A feature that needs
  two lines (budget: +1,200 code lines).
- A mend (budget: +40 code lines).
- An entry without a budget.
"""
)


def test_new_changelog_entries_allow_code_growth():
    assert weight.allowed_growth(BEFORE, AFTER) == 1240


def test_old_changelog_entries_allow_no_growth():
    assert weight.allowed_growth(AFTER, AFTER) == weight.allowed_growth(AFTER, BEFORE) == 0


def test_words_exclude_table_pipes_and_rules():
    assert weight.words("Set `a.b` – or 2:\n\n| key | default |\n|---|---:|\n| c | 1 × |") == 8


@pytest.mark.slow
def test_weight_check_fails_if_growth_exceeds_budget(tmp_path):
    repo = tmp_path / "repo"
    (repo / "raytrec").mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repo)]
    for folder in ("docs", "tests", "benchmarks", "datasets", "raytrec/config"):
        (repo / folder).mkdir()
    for page in weight.TOP_PAGES:
        (repo / page).write_text(BEFORE)
    (repo / "raytrec/config/schema.py").write_text("class ManagedIds:\n    model_fields = {}\n")
    (repo / "raytrec/config/run_config.py").write_text("class RunConfig:\n    model_fields = {}\n")
    (repo / "benchmarks/weight.py").write_text((REPO / "benchmarks/weight.py").read_text())
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "First"]):
        subprocess.run([*git, *command], check=True)

    def weigh() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "benchmarks/weight.py", "--against", "HEAD"]
        return subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=60)

    assert weigh().returncode == 0
    (repo / "raytrec/more.py").write_text("a = 1\n" * 50)
    grown = weigh()
    assert grown.returncode == 1
    assert "grown by 50 code lines; the new entries of CHANGELOG.md allow 0" in grown.stderr
    (repo / "CHANGELOG.md").write_text(BEFORE + "- More (budget: +50 code lines).\n")
    assert weigh().returncode == 0

"""Tests of the lint for commit subjects (`benchmarks/commits.py`)."""

import subprocess

import commits
import pytest


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Fixes the first step on GPUs", "is not imperative"),
        ("Fixed the first step on GPUs", "is not imperative"),
        ("add a check", "does not begin with a capital letter"),
        ("Add a check.", "ends with a period"),
        ("Add " + 70 * "a", "has 74 characters, the limit is 72"),
    ],
)
def test_commit_lint_reports_subject_and_fault(subject, fault):
    lines = commits.find_faults(["Add a table", subject, "Read \"quoted\" 'names' and \\ as they are"])
    assert len(lines) == 1
    assert lines[0].startswith(repr(subject))
    assert fault in lines[0]


def test_read_subjects_skips_merge_commits(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True, timeout=60)

    assert commits.read_subjects(5, tmp_path) == []
    git("init", "--initial-branch=main")
    git("commit", "--allow-empty", "-m", "Add one")
    git("checkout", "-b", "other")
    git("commit", "--allow-empty", "-m", "Add two", "-m", "The body is not read.")
    git("checkout", "main")
    git("merge", "--no-ff", "-m", "Merge branch 'other'", "other")
    git("commit", "--allow-empty", "-m", "Add three")
    assert sorted(commits.read_subjects(5, tmp_path)) == ["Add one", "Add three", "Add two"]
    assert commits.read_subjects(1, tmp_path) == ["Add three"]

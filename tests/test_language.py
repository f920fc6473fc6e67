"""Tests of the language lint (`benchmarks/language.py`), which matches across string literals and lines."""

from pathlib import Path

import language
import pytest

REPO = Path(__file__).parents[1]
BANNED_WORD = "own"  # inserted at run time because the lint also reads this file


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('a = 1\nb = "a table of "  "its PLACE"\n', 2),
        ('a = (\n    f"{a} of its"\n    " PLACE"\n)\n', 2),
        ('"""A table of its\nPLACE."""\n', 1),
        ("# A table of its\n# PLACE.\n", 1),
        ("a = 1  # first\n\n# A table of its PLACE.\n", 3),
    ],
)
def test_language_lint_finds_phrase_across_lines(tmp_path, capsys, source, line):
    path = tmp_path / "module.py"
    path.write_text(source.replace("PLACE", BANNED_WORD))
    assert language.main([str(path)]) == 1
    printed = capsys.readouterr().out
    assert f"module.py:{line}: " in printed
    assert "1 words to replace" in printed


def test_language_lint_skips_code(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"Code: `of its {BANNED_WORD}`.\n\n```\nof its {BANNED_WORD}\n```\n")
    module = tmp_path / "module.py"
    module.write_text('a = "of "\nb = "its own"\nof = its = own = 1\n')
    assert language.main([str(page), str(module)]) == 0

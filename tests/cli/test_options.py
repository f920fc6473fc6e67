"""Test that the options of a command follow from its parameters and its docstring."""

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from raytrec.cli import app
from raytrec.cli.options import with_options

received = []


def command(
    place: Annotated[Path, typer.Argument(metavar="PLACE")],
    rows: int = 7,
    share: Annotated[float, typer.Option("--part", max=1)] = 0.5,
    kinds: list[str] | None = None,
    dry_run: bool = False,
    seed: int = 0,
):
    """Do it.

    Options:
        place: Where it is done.
        rows (N): Rows to read,
            as many as there are.
        share: Of the rows.
    """
    received.append((place, rows, share, kinds, dry_run, seed))


def run(*arguments):
    received.clear()
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command()(with_options(command, {"seed": typer.Option("--from-seed", help="Seeds it.")}))
    return CliRunner().invoke(single, arguments)


def test_parameters_become_arguments_options_and_flags():
    assert run("a").exit_code == 0 and received == [(Path("a"), 7, 0.5, None, False, 0)]
    words = ["a", "--rows", "3", "--part", "1", "--kinds", "x", "--kinds", "y", "--dry-run"]
    assert run(*words, "--from-seed", "2").exit_code == 0 and received == [(Path("a"), 3, 1.0, ["x", "y"], True, 2)]


@pytest.mark.parametrize("words", [[], ["a", "--part", "2"], ["a", "--no-dry-run"], ["a", "--rows", "x"]])
def test_invalid_arguments_are_rejected(words):
    assert run(*words).exit_code == 2 and not received


def test_command_help_comes_from_the_docstring():
    shown = " ".join(run("--help").output.split())
    for text in ("Do it.", "--rows N Rows to read, as many as there are.", "Of the rows.", "Seeds it."):
        assert text in shown
    assert "PLACE <path> Where it is done." in shown and "rows (N)" not in shown


def test_every_command_option_has_help():
    group = typer.main.get_command(app)
    commands = {name: group.get_command(None, name) for name in group.list_commands(None)}
    prepare = commands.pop("prepare")
    commands |= {name: prepare.get_command(None, name) for name in prepare.list_commands(None)}
    lacking = [
        (name, parameter.name)
        for name, command in commands.items()
        for parameter in command.params
        if not getattr(parameter, "help", None) and parameter.name != "config"
    ]
    assert len(commands) > 20 and not lacking

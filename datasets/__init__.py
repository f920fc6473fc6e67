"""Recipes that convert public data into Parquet and a schema.yaml; the commands of `raytrec prepare`.

A recipe is a function. The types and defaults of its parameters determine the command's options, and the
section `Args` or `Options` of its docstring contains their help texts:

    def prepare(out: Path, rows: int = 1000, force: bool = False):
        '''Write clicks of our shop.'''
        output = Output(out, "shop", {"rows": rows}, force)  # raytrec_datasets/writing.py
        ...

A recipe in this folder is a function named `prepare` in NAME/__init__.py and runs as `raytrec prepare NAME`;
criteo/ is an example to copy. Slow imports belong inside the function, so that --help responds quickly. Users
can run their own recipes with `raytrec prepare module:function`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from raytrec.common.errors import ConfigError
from raytrec.common.storage import RAY_JOB_COPIES, ROOT, make_absolute


def resolve_path_option(text: str) -> Path:
    """Return a path as given or, in a job on a cluster, as a path in the shared folder (make_absolute)."""
    return Path(make_absolute(text)) if os.environ.get(ROOT) or RAY_JOB_COPIES in os.getcwd() else Path(text)


def check_width(width: int) -> int:
    """Return the width of embeddings that an option gives, or raise BadParameter if FBGEMM does not support it."""
    if width % 4:
        raise typer.BadParameter(f"{width} is not a multiple of 4.")
    return width


Count = Annotated[int, typer.Option(min=0)]
PositiveCount = Annotated[int, typer.Option(min=1)]
File = Annotated[Path | None, typer.Option(parser=resolve_path_option, metavar="FILE")]
# Options shared by recipes. A parameter with one of these names needs no annotation.
SHARED = {
    "out": typer.Option(parser=resolve_path_option, metavar="PATH", help="Folder to write Parquet and schema.yaml to."),
    "force": typer.Option("--force", help="Replace a folder that a recipe has prepared."),
    "dim": typer.Option(min=4, max=2**16, callback=check_width, help="Width of the embeddings; a multiple of 4."),
    "seed": typer.Option(help="Random seed; the same seed produces the same data."),
    "source": typer.Option(parser=resolve_path_option, metavar="PATH", help="Folder with the original files."),
}


class Recipes(TyperGroup):
    """Command group with the recipes in this folder and users' own recipes (`module:function`)."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the recipes in this folder, sorted."""
        return sorted(module.name for module in iter_modules(__path__) if module.ispkg)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a recipe, or None if no recipe in this folder has this name.

        Raises:
            ConfigError: A name `module:function` cannot be imported or does not name a function.
            Exception: Any error raised by a user's module during import.
        """
        from raytrec.cli.options import with_options  # imports this package

        if ":" in cmd_name:
            recipe = find_recipe(cmd_name)
        elif cmd_name in self.list_commands(ctx):
            recipe = import_module(f"{__name__}.{cmd_name}").prepare
        else:
            return None
        single = typer.Typer(rich_markup_mode=None, add_completion=False)
        single.command(cmd_name)(with_options(recipe, SHARED))
        return typer.main.get_command(single)


app = typer.Typer(cls=Recipes, no_args_is_help=True)


@app.callback()
def _prepare() -> None:
    """Write Parquet and a schema.yaml from public data, or with your own function (module:function)."""


def find_recipe(path: str) -> Callable[..., None]:
    """Return the function that `module:function` names; search the working directory if the module is not found.

    Raises:
        ConfigError: The name cannot be imported or does not name a function.
        Exception: Any error raised by the user's module during import.
    """
    from raytrec.common.registry import find_code

    recipe = find_code(path, "recipe", "raytrec prepare", os.getcwd())
    if not inspect.isfunction(recipe):
        raise ConfigError(
            f"the recipe {path} is not a function", where="raytrec prepare", expected="def prepare(out: Path, …)"
        )
    return recipe

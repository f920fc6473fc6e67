"""Recipes: how public data becomes Parquet and a schema.yaml. Commands of `raytrec prepare`.

A recipe is a function. Its parameters are the command's options (what is not annotated as one becomes one by
its type and default), and its docstring is their help:

    def prepare(out: Path, rows: int = 1000, force: bool = False):
        '''Clicks of our shop.'''
        output = Output(out, "shop", {"rows": rows}, force)  # raytrec_datasets/writing.py
        ...

In this folder it is called `prepare` and stands in NAME/__init__.py, as `raytrec prepare NAME`: copy
criteo/. What takes long to import is imported inside it, so that --help answers at once. One of your own is
`raytrec prepare module:function`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, get_type_hints

import typer
from raytrec_datasets.options import SHARED
from typer.core import TyperGroup
from typer.models import OptionInfo

from raytrec.common.errors import ConfigError


class Recipes(TyperGroup):
    """The recipes of this folder, and the user's own."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(module.name for module in iter_modules(__path__) if module.ispkg)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if ":" in cmd_name:
            recipe = find_recipe(cmd_name)
        elif cmd_name in self.list_commands(ctx):
            recipe = import_module(f"{__name__}.{cmd_name}").prepare
        else:
            return None
        single = typer.Typer(rich_markup_mode=None, add_completion=False)
        single.command(cmd_name)(with_options(recipe))
        return typer.main.get_command(single)


app = typer.Typer(cls=Recipes, no_args_is_help=True)


@app.callback()
def _prepare() -> None:
    """Write Parquet and a schema.yaml from public data, or with a function of yours (module:function)."""


def find_recipe(path: str) -> Callable[..., None]:
    """The function that `module:function` names.

    Raises:
        ConfigError: there is none.
    """
    from raytrec.common.registry import find_code

    found = find_code(path, "recipe", "raytrec prepare", os.getcwd())
    if not inspect.isfunction(found):
        raise ConfigError(
            f"the recipe {path} is not a function",
            where="raytrec prepare",
            expected="def prepare(out: Path, …)",
        )
    return found


def with_options(recipe: Callable[..., None]) -> Callable[..., None]:
    """The recipe with each parameter a command line option."""

    def run(**values: Any) -> None:
        recipe(**values)

    hints, parameters = get_type_hints(recipe, include_extras=True), inspect.signature(recipe).parameters
    options = [p.replace(annotation=_option(name, hints.get(name, str))) for name, p in parameters.items()]
    run.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in options])
    run.__annotations__ = {p.name: p.annotation for p in options}
    run.__doc__ = recipe.__doc__
    return run


def _option(name: str, hint: Any) -> Any:
    """A parameter's annotation as that of an option."""
    if any(isinstance(part, OptionInfo) for part in getattr(hint, "__metadata__", ())):
        return hint
    return Annotated[hint, *SHARED[name].__metadata__] if name in SHARED else Annotated[hint, typer.Option()]

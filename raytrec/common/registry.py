"""Registries of a package's parts, and imports of `module:name` from users' code.

A part is a class or function, such as a loss, that is registered under a name:

    loss: Registry[type[Loss]] = Registry("loss", "raytrec.tasks.losses")

    @loss("bce")
    class BinaryCrossEntropy(Loss): ...

A package's files are imported at the first lookup, so a new part needs only its own file.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from raytrec.common.errors import ConfigError, format_suggestion, make_unknown_word_error

PYTHON_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:name
T = TypeVar("T")


def load_code(path: str, folder: str | None = None) -> Any:
    """Import the object named by `module:name`.

    Args:
        path: `module:name`.
        folder: Folder that is added to sys.path for good if the module is not found; None: no folder.

    Raises:
        ModuleNotFoundError: The module, or a module that it imports, does not exist.
        AttributeError: The module has no such name.
        Exception: Any error raised by the module during import.
    """
    module, _, name = path.partition(":")
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        if folder is None or folder in sys.path or error.name != module.partition(".")[0]:
            raise
        sys.path.insert(0, folder)
        imported = import_module(module)
    return getattr(imported, name)


class Registry(Generic[T]):
    """Registry of parts of one kind by name.

    Args:
        kind: Noun for a part in errors, such as "loss".
        package: Package whose files define the parts.
    """

    def __init__(self, kind: str, package: str):
        self._kind, self._package, self._parts = kind, package, {}
        self._complete = False

    def __call__(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers a part under a name, if the part is defined in the registry's package.

        The decorator returns the part. It raises a ValueError if another part has this name.
        """

        def register(part: Any) -> Any:
            if not f"{part.__module__}.".startswith(f"{self._package}."):
                return part
            first = self._parts.setdefault(name, part)
            if (first.__module__, first.__qualname__) != (part.__module__, part.__qualname__):
                raise ValueError(f"{self._kind} {name} is registered twice: {first} and {part}")
            self._parts[name] = part
            return part

        return register

    @property
    def parts(self) -> dict[str, T]:
        """Parts of the package by name, in alphabetical order.

        The first access imports all modules of the package, and may raise any error of their import.
        """
        if not self._complete:
            for module in list_modules(self._package):
                import_module(f"{self._package}.{module}")
            self._complete = True
        return dict(sorted(self._parts.items()))

    def find(self, name: str, where: str, folder: str | None = None) -> T:
        """Return the part with this name, or import the object named by `module:name`.

        Args:
            name: Name of a part, or `module:name`.
            where: Configuration key, for errors.
            folder: Folder that is added to sys.path if the module is not found; None: no folder.

        Raises:
            ConfigError: There is no part with this name, or `module:name` cannot be imported (`find_code`).
            Exception: Any error raised by the module during import.
        """
        parts = self.parts
        if name in parts:
            return parts[name]
        if PYTHON_PATH.fullmatch(name):
            return find_code(name, self._kind, where, folder)
        expected = f"{', '.join(parts)}, or module:name of a user-defined {self._kind}"
        raise make_unknown_word_error(f"there is no {self._kind} '{name}'", name, parts, where, expected)


def list_modules(package: str) -> list[str]:
    """Return the names of a package's modules in alphabetical order; only the package itself is imported."""
    spec = find_spec(package)
    return sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))


def find_code(path: str, kind: str, where: str, folder: str | None = None) -> Any:
    """Import the object named by `module:name`, and raise a ConfigError if the object does not exist.

    Args:
        path: `module:name`.
        kind: Noun for the object, for errors.
        where: Configuration key, for errors.
        folder: Folder that is added to sys.path if the module is not found; None: no folder.

    Raises:
        ConfigError: The module, or a module that it imports, does not exist; or the module has no such name.
        Exception: Any error raised by the module during import.
    """
    module, _, name = path.partition(":")
    try:
        return load_code(path, folder)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cannot import {kind} {path}: no module named '{error.name}'",
            where=where,
            expected=f"{error.name} on the Python path of every worker, or in the command's working directory",
        ) from None
    except AttributeError:
        if module not in sys.modules:
            raise  # an error in the module's own code
        raise ConfigError(
            f"cannot import {kind} {path}: the module has no attribute '{name}'"
            + format_suggestion(name, [n for n in vars(sys.modules[module]) if not n.startswith("_")]),
            where=where,
            expected=f"module:name of an object in {module}",
        ) from None

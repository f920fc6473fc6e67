"""Named parts, one file each, or `module:name` of a user.

    loss: Registry[type[Loss]] = Registry("loss", "raytrec.tasks.losses")

    @loss("bce")
    class BinaryCrossEntropy(Loss): ...

The package's files are imported when a part is first asked for, so that a new one needs no line elsewhere.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from raytrec.common.errors import ConfigError, hint, unknown

PYTHON_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:name
T = TypeVar("T")


def load_code(path: str, folder: str | None = None) -> Any:
    """What `module:name` names.

    Args:
        folder: where the module may be, in addition to Python's own path; the folder of the command.

    Raises:
        ModuleNotFoundError: no such module (or one that it imports). AttributeError: nothing of that name in
            it. Whatever else the module raises while it is imported.
    """
    module, _, name = path.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if folder is None or folder in sys.path or error.name != module.partition(".")[0]:
            raise
        sys.path.insert(0, folder)
        found = import_module(module)
    return getattr(found, name)


class Registry(Generic[T]):
    """Parts of one kind by their names.

    Args:
        kind: what they are, for errors: loss.
        package: whose files define them.
    """

    def __init__(self, kind: str, package: str):
        self._kind, self._package, self._parts = kind, package, {}
        self._complete = False

    def __call__(self, name: str) -> Callable[[T], T]:
        """Decorator: registers a part of the package under a name; one of a user's has its module:name.

        Raises:
            ValueError: another one has it.
        """

        def register(part: Any) -> Any:
            if not f"{part.__module__}.".startswith(f"{self._package}."):
                return part
            known = self._parts.setdefault(name, part)
            if (known.__module__, known.__qualname__) != (part.__module__, part.__qualname__):
                raise ValueError(f"two parts are called {self._kind} {name}: {known} and {part}")
            self._parts[name] = part
            return part

        return register

    @property
    def parts(self) -> dict[str, T]:
        """The package's, in alphabetical order of their names."""
        if not self._complete:
            for module in modules_of(self._package):
                import_module(f"{self._package}.{module}")
            self._complete = True
        return dict(sorted(self._parts.items()))

    def find(self, name: str, where: str, folder: str | None = None) -> T:
        """The part of this name, or what `module:name` names; that is imported.

        Args:
            where: the configuration's key, for errors.
            folder: where the module may be, in addition to Python's own path; the folder of the command.

        Raises:
            ConfigError: there is none. Whatever else the module raises while it is imported.
        """
        parts = self.parts
        if name in parts:
            return parts[name]
        if PYTHON_PATH.fullmatch(name):
            return find_code(name, self._kind, where, folder)
        expected = f"{', '.join(parts)}, or module:name for one of your own"
        raise unknown(f"there is no {self._kind} '{name}'", name, parts, where, expected)


def modules_of(package: str) -> list[str]:
    """The names of a package's modules, in alphabetical order; none of them is imported."""
    found = find_spec(package)
    return sorted(module.name for module in pkgutil.iter_modules(found.submodule_search_locations))


def find_code(path: str, kind: str, where: str, folder: str | None = None) -> Any:
    """What `module:name` names; the module is imported.

    Args:
        kind: what it should be, for errors. where, folder: as in `Registry.find`.

    Raises:
        ConfigError: there is no such module, or nothing of that name in it. Whatever else the module raises
            while it is imported.
    """
    module, _, name = path.partition(":")
    try:
        return load_code(path, folder)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"no {kind} {path}: there is no module {error.name}",
            where=where,
            expected=f"{module} on Python's path of every worker, or in the folder that the command was "
            "given in",
        ) from None
    except AttributeError:
        if module not in sys.modules:
            raise  # the module's own error, while it was imported
        raise ConfigError(
            f"no {kind} {path}: the module has no {name}"
            + hint(name, [n for n in vars(sys.modules[module]) if not n.startswith("_")]),
            where=where,
            expected="module:name",
        ) from None

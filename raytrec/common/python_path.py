"""Code that a configuration names as `module:name`: a transform's function, a model's class."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any

PYTHON_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:name


def load(path: str, folder: str | None = None) -> Any:
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

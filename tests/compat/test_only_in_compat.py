"""Only raytrec/compat uses private upstream names or assigns to upstream objects."""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UPSTREAM = {"ray", "torch", "torchrec", "fbgemm_gpu", "mlflow", "torchmetrics"}
PUBLIC_PREFIXES = ("torch.backends.", "torch.utils.")  # settings that users may assign
FILES = sorted(
    path
    for folder in ("raytrec", "datasets", "jobs", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if ROOT / "raytrec" / "compat" not in path.parents
)
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Upstream names without a public interface: files, environment variables, error texts.
LITERALS = (
    "checkpoint_manager_snapshot",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_TRAIN_",
    "ray_current_cluster",
    "node:__internal_head__",
    "/ray.rpc.",
    "Initialization failure from server",
    "Starting Ray client server failed",
    "No available agent",
    "node has died",
    "running low on memory",
    "mlflow.parentRunId",
    "mlflow.experimentKind",
)


class PrivateNameFinder(ast.NodeVisitor):
    """A visitor that collects a file's uses of private upstream names.

    Attributes:
        found: (line, description) of each use.
    """

    def __init__(self, tree):
        self.found, self._imported = [], {}
        self._own = _own(tree)
        for node in ast.walk(tree):  # collect imports first
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._note(node)
        self.visit(tree)

    def _note(self, node):
        module = getattr(node, "module", None)
        for alias in node.names:
            path = f"{module}.{alias.name}" if module else alias.name
            if path.partition(".")[0] in UPSTREAM:
                name = alias.asname or (alias.name if module else alias.name.partition(".")[0])
                self._imported[name] = path if module or alias.asname else path.partition(".")[0]
                if any(map(_is_private, path.split("."))):
                    self.found.append((node.lineno, f"import of {path}"))

    def visit_Attribute(self, node):
        path = self._path(node)
        if _is_private(node.attr) and not (
            node.attr in self._own
            or (isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in _of_own_classes())
            or _is_python(node)
        ):
            self.found.append((node.lineno, ast.unparse(node)))
        elif path and any(map(_is_private, path.split("."))):
            self.found.append((node.lineno, path))
        elif path and isinstance(node.ctx, ast.Store) and not path.startswith(PUBLIC_PREFIXES):
            self.found.append((node.lineno, f"assignment to {path}"))
        self.generic_visit(node)

    def visit_Call(self, node):
        called = _dotted(node.func)
        if called in ("setattr", "delattr") and self._path(node.args[0]):
            self.found.append((node.lineno, f"{called} on {self._path(node.args[0])}"))
        hides = called == "hasattr" or (called == "getattr" and len(node.args) == 3)
        if hides and self._path(node.args[0]):
            self.found.append((node.lineno, f"{called} on {self._path(node.args[0])} hides what has moved"))
        if called in ("import_module", "importlib.import_module") and isinstance(node.args[0], ast.Constant):
            path = node.args[0].value
            if path.partition(".")[0] in UPSTREAM and any(map(_is_private, path.split("."))):
                self.found.append((node.lineno, f"import of {path}"))
        self.generic_visit(node)

    def visit_keyword(self, node):
        if node.arg and _is_private(node.arg):
            self.found.append((node.value.lineno, f"argument {node.arg}"))
        self.generic_visit(node)

    def visit_ClassDef(self, node):
        """Report private methods of classes that inherit from upstream; they may be overrides."""
        bases = [path for base in node.bases if (path := self._path(base))]
        for method in node.body:
            named = isinstance(method, ast.FunctionDef) and _is_private(method.name)
            if named and self._has(bases, method):
                self.found.append((method.lineno, f"override of {bases[0]}.{method.name}"))
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, str) and (text := next((t for t in LITERALS if t in node.value), None)):
            self.found.append((node.lineno, f"'{text}'"))

    def _path(self, node):
        """Return the upstream path of an expression such as `torch.nn.Module`, or None."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id)
        if isinstance(node, ast.Attribute) and (base := self._path(node.value)):
            return f"{base}.{node.attr}"
        return None

    @staticmethod
    def _has(bases, method):
        for path in bases:
            module, _, name = path.rpartition(".")
            if hasattr(getattr(import_module(module), name), method.name):
                return True
        return False


def _is_python(node):
    """Return True for Python's own private names: os._exit, sys._current_frames, a namedtuple's _replace."""
    module = node.value.id if isinstance(node.value, ast.Name) else ""
    return module in ("os", "sys") or node.attr == "_replace"


def _own(tree):
    """Return the names that a file defines."""
    nodes = list(ast.walk(tree))
    names = {n.name for n in nodes if isinstance(n, DEFINITIONS)}
    names |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return names | {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


@cache
def _of_own_classes():
    """Return the names that any file of raytrec defines, which `self` may inherit."""
    return set().union(*(_own(_parsed(path)) for path in FILES))


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def _dotted(node):
    """Return an expression such as `torch.nn.Module` as text, or "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


@cache
def _parsed(path):
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_compat_uses_private_upstream_names(path):
    own = "benchmarks" in path.parts  # benchmarks may use private names of raytrec
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for line, what in sorted(PrivateNameFinder(_parsed(path)).found)
        if not own or not what.partition("._")[0].isidentifier()
    ]
    assert not found, "\n".join([*found, "private upstream names may be used only in raytrec/compat"])


@pytest.mark.parametrize(
    "source",
    [
        "import ray\nray._private.worker.x()",
        "from ray._private import services",
        "from ray.train.v2._internal.execution import a",
        "from torch.distributed.optim import _apply_optimizer_in_backward as apply",
        "import torch\ntorch._foreach_mul_([], 2)",
        "import torch.distributed as dist\ndist.Work.wait = None",
        "import torch\nsetattr(torch.distributed, 'x', 1)",
        "import torch\nhasattr(torch.cuda, 'x')",
        "import torch\ngetattr(torch.cuda, 'x', None)",
        "def f(module):\n    return module._lookups",
        "import ray\nray.init(_temp_dir='/tmp')",
        "from torch import nn\nclass A(nn.Module):\n    def _apply(self, fn):\n        pass",
        "importlib.import_module('ray._raylet')",
        "NAME = 'checkpoint_manager_snapshot.json'",
    ],
)
def test_finder_reports_private_uses(source):
    assert PrivateNameFinder(ast.parse(source)).found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
        "import os\nos._exit(1)",
        "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self):\n        return self._x",
        "from torch import nn\nclass A(nn.Module):\n    def _own(self):\n        return self._own()",
        "import torch\ngetattr(torch, 'float32')",
    ],
)
def test_finder_ignores_public_uses(source):
    assert not PrivateNameFinder(ast.parse(source)).found

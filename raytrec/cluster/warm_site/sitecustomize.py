"""What a Python process does first if this folder is on its PYTHONPATH: a worker of Ray's asks for a fork.

Raylets of a cluster that a run has joined start workers in their own way, so this is how one comes to be
forked by the node's warm process (warm_nodes.py). Where there is none, and in any other program, nothing
happens but that the folder leaves the path, and the sitecustomize that it hides is imported.
"""

import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _ask() -> None:
    path = os.path.join(os.path.dirname(HERE), "forked_worker.py")
    spec = importlib.util.spec_from_file_location("_raytrec_forked_worker", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.forked_on_node(sys.orig_argv[1:]):
        os._exit(0)


def _import_hidden() -> None:
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != HERE]
    del sys.modules["sitecustomize"]
    try:
        import sitecustomize  # noqa: F401
    except ImportError:
        sys.modules["sitecustomize"] = _ME


_ME = sys.modules["sitecustomize"]
_import_hidden()  # first: the fork gets the environment that it may set
if any(os.path.basename(part) == "default_worker.py" for part in sys.orig_argv[1:3]):
    _ask()

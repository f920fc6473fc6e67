"""Attribution of a hang: threads that wait for other ranks."""

from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

import pytest

from raytrec.worker.heartbeat import PACKAGE, _locate_thread

TORCH, TORCHREC = (Path(find_spec(name).origin).parent for name in ("torch", "torchrec"))

SITE_PACKAGES = "/home/me/raytrec/.venv/lib/python3.11/site-packages/"  # path after `git clone` and `make install`


def locate_blocked_thread(*files):
    """Return the place of a thread that is blocked in functions of these files, outermost first."""
    blocked, release = Event(), Event()

    def block():
        blocked.set()
        release.wait(30)

    call = block
    for file in reversed(files):
        scope = {"inner": call}
        exec(compile("def call():\n    inner()\n", file, "exec"), scope)
        call = scope["call"]
    thread = Thread(target=call)
    thread.start()
    assert blocked.wait(30)
    try:
        return _locate_thread(thread.ident)[1]
    finally:
        release.set()
        thread.join()


LOOP, MODEL = f"{PACKAGE}worker/loop.py", f"{PACKAGE}models/mine.py"
COLLECTIVE, LINEAR = f"{TORCH}/distributed/c10d.py", f"{TORCH}/nn/linear.py"
TOOL = f"{SITE_PACKAGES}raytrec_tools/x.py"


@pytest.mark.parametrize(
    ("files", "waits"),
    [
        ((LOOP, COLLECTIVE), True),
        ((LOOP, COLLECTIVE, TOOL), True),
        ((COLLECTIVE, MODEL, LINEAR), False),
        ((LOOP, LINEAR), False),
        ((LOOP, f"{TORCHREC}/distributed/dist_data.py"), True),
        ((LOOP, "/home/me/torch/distributed/app/.venv/lib/site-packages/pyarrow/parquet/core.py"), False),
    ],
    ids=["collective", "tool in a collective", "model", "layer", "torchrec", "checkout named like a folder of torch"],
)
def test_collective_is_recognized_in_a_raytrec_checkout(files, waits):
    assert locate_blocked_thread(*files) is waits

"""Fixtures and hooks of the test suite: shared loopback Ray clusters (one at a time), order and grouping."""

import atexit
import gc
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

# Names that mark a test module as one that starts processes.
FORKS = {"on_ranks", "ranks", "assert_parity", "warm"}
STARTS = FORKS | {"subprocess", "multiprocessing", "ray_session", "heads", "hosts", "Head"}
# Ray fixture -> xdist group suffix. Tests run in this order, after all tests without Ray.
ON_RAY = {"ray_with_gpus": "on Ray with GPUs", "ray_cluster": "on Ray"}
# Slowest test modules on the shared Ray. They run first so that parallel workers finish at the same time.
LONGEST = ["test_driver", "test_survive", "test_out_of_tree", "test_cli", "test_warm_start", "test_check"]


def pytest_sessionstart(session):
    """End the process after Python's exit handlers, as the raytrec command does (common/processes.py)."""

    def end():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(session.exitstatus)

    atexit.register(end)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Sort and group the tests.

    Tests on the shared Ray run last, because other tests require that no Ray is running. Tests of a module
    share an xdist group; all tests with GPUs share one group.
    """
    for item in items:
        ray = ray_of(item)
        if ray or STARTS & vars(item.module).keys():
            item.add_marker("processes")
        module = [] if ray == "ray_with_gpus" else [item.module.__name__]
        item.add_marker(pytest.mark.xdist_group(", ".join(module + ([ON_RAY[ray]] if ray else []))))
    items.sort(key=place_in_the_order)


def ray_of(item):
    """Return the name of the Ray fixture that a test uses, or None."""
    return next((name for name in ON_RAY if name in item.fixturenames), None)


def place_in_the_order(item):
    name, ray = item.module.__name__, ray_of(item)
    kinds = [None, *ON_RAY]
    return kinds.index(ray), LONGEST.index(name) if ray and name in LONGEST else len(LONGEST)


def pytest_collection_finish(session):
    """Check that pytest-xdist added group suffixes to the test ids (it fails to with pytest 9.2)."""
    if session.config.getoption("loadgroup", False) and session.items:
        assert "@" in session.items[-1].nodeid, "pytest-xdist does not keep the tests of a module together"
    gc.freeze()  # exclude imported modules from later garbage collections
    if any(FORKS & vars(item.module).keys() for item in session.items):
        import warm

        warm.copy_this_process()


@pytest.fixture(scope="session")
def _rays():
    from rays import Rays

    rays = Rays()
    yield rays
    rays.close()


@pytest.fixture(scope="module")
def ray_cluster(_rays):
    """Start or reuse a local Ray on loopback with 6 logical CPUs."""
    _rays.use(0)


@pytest.fixture(scope="module")
def ray_with_gpus(_rays):
    """Start or reuse a local Ray with 6 logical CPUs and 2 simulated GPUs."""
    _rays.use(2)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Return a folder written by parquet.dataset. Tests must not change it."""
    import parquet

    return parquet.dataset(tmp_path_factory.mktemp("tiny") / "d")


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Yield a Ray head on loopback with a parquet.dataset in data/tiny below its root."""
    import parquet
    from heads import Head

    with Head(tmp_path_factory.mktemp("head") / "h") as head:
        parquet.dataset(head.root / "data" / "tiny")
        yield head

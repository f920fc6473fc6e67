"""Fixtures and hooks of the test suite: shared loopback Ray clusters (one at a time), order and grouping."""

import atexit
import gc
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

# Names that mark a test module as one that starts processes.
FORKING_NAMES = {"run_on_ranks", "ranks", "assert_parity", "warm"}
PROCESS_STARTING_NAMES = FORKING_NAMES | {"subprocess", "multiprocessing", "ray_session", "heads", "hosts", "Head"}
# Ray fixture -> xdist group suffix. Tests run in this order, after all tests without Ray.
RAY_GROUPS = {"ray_with_gpus": "on Ray with GPUs", "ray_cluster": "on Ray"}
# Slowest test modules on the shared Ray. They run first so that parallel workers finish at the same time.
LONGEST_MODULES = ["test_driver", "test_survive", "test_out_of_tree", "test_cli", "test_warm_start", "test_check"]


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
        ray = find_ray_fixture(item)
        if ray or PROCESS_STARTING_NAMES & vars(item.module).keys():
            item.add_marker("processes")
        module = [] if ray == "ray_with_gpus" else [item.module.__name__]
        item.add_marker(pytest.mark.xdist_group(", ".join(module + ([RAY_GROUPS[ray]] if ray else []))))
    items.sort(key=collection_order_key)


def find_ray_fixture(item):
    """Return the name of the Ray fixture that a test uses, or None."""
    return next((name for name in RAY_GROUPS if name in item.fixturenames), None)


def collection_order_key(item):
    name, ray = item.module.__name__, find_ray_fixture(item)
    kinds = [None, *RAY_GROUPS]
    return kinds.index(ray), LONGEST_MODULES.index(name) if ray and name in LONGEST_MODULES else len(LONGEST_MODULES)


def pytest_collection_finish(session):
    """Check that pytest-xdist added group suffixes to the test ids (it fails to with pytest 9.2)."""
    if session.config.getoption("loadgroup", False) and session.items:
        assert "@" in session.items[-1].nodeid, "pytest-xdist does not keep the tests of a module together"
    gc.freeze()  # exclude imported modules from later garbage collections
    if any(FORKING_NAMES & vars(item.module).keys() for item in session.items):
        import warm

        warm.fork_from_copy()


@pytest.fixture(scope="session")
def _shared_ray():
    from rays import SharedRay

    rays = SharedRay()
    yield rays
    rays.close()


@pytest.fixture(scope="module")
def ray_cluster(_shared_ray):
    """Start or reuse a local Ray on loopback with 6 logical CPUs."""
    _shared_ray.use(0)


@pytest.fixture(scope="module")
def ray_with_gpus(_shared_ray):
    """Start or reuse a local Ray with 6 logical CPUs and 2 simulated GPUs."""
    _shared_ray.use(2)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Return a folder written by parquet.write_dataset. Tests must not change it."""
    import parquet

    return parquet.write_dataset(tmp_path_factory.mktemp("tiny") / "d")


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Yield a Ray head on loopback with a parquet.write_dataset in data/tiny below its root."""
    import parquet
    from heads import RayHead

    with RayHead(tmp_path_factory.mktemp("head") / "h") as head:
        parquet.write_dataset(head.root / "data" / "tiny")
        yield head

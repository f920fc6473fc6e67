"""What tests share: loopback Ray clusters, one at a time."""

import atexit
import gc
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

# Names in a test's module by which it is known to start processes.
FORKS = {"on_ranks", "ranks", "assert_parity", "warm"}
STARTS = FORKS | {"subprocess", "multiprocessing", "ray_session", "heads", "hosts", "Head"}
# Fixtures by which tests have a Ray, in the order of these tests.
ON_RAY = {"ray_with_gpus": "on Ray with GPUs", "ray_cluster": "on Ray"}
# Modules of tests on the shared Ray that take longest: first, so that two that run at once end together.
LONGEST = ["test_driver", "test_survive", "test_out_of_tree", "test_cli", "test_warm_start", "test_check"]


def pytest_sessionstart(session):
    """After Python's own end comes that of the process, as for the command (common/processes.py)."""

    def end():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(session.exitstatus)

    atexit.register(end)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that share a Ray come last, as others must find none; modules stay together, and those few that
    want GPUs with one another."""
    for item in items:
        ray = ray_of(item)
        if ray or STARTS & vars(item.module).keys():
            item.add_marker("processes")
        module = [] if ray == "ray_with_gpus" else [item.module.__name__]
        item.add_marker(pytest.mark.xdist_group(", ".join(module + ([ON_RAY[ray]] if ray else []))))
    items.sort(key=place_in_the_order)


def ray_of(item):
    """The fixture by which a test has a Ray; None: it has none."""
    return next((name for name in ON_RAY if name in item.fixturenames), None)


def place_in_the_order(item):
    name, ray = item.module.__name__, ray_of(item)
    kinds = [None, *ON_RAY]
    return kinds.index(ray), LONGEST.index(name) if ray and name in LONGEST else len(LONGEST)


def pytest_collection_finish(session):
    """pytest-xdist groups tests by a suffix of their names, which it could not set with pytest 9.2."""
    if session.config.getoption("loadgroup", False) and session.items:
        assert "@" in session.items[-1].nodeid, "pytest-xdist does not keep the tests of a module together"
    gc.freeze()  # what has been imported stays: no collection looks at it again
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
    """A local Ray on loopback with 6 logical CPUs, which tests share."""
    _rays.use(0)


@pytest.fixture(scope="module")
def ray_with_gpus(_rays):
    """One that counts 2 GPUs, too; there are none."""
    _rays.use(2)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """A folder of parquet.dataset that tests share and do not change."""
    import parquet

    return parquet.dataset(tmp_path_factory.mktemp("tiny") / "d")


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A Ray head on loopback, with parquet.dataset as data/tiny below its root."""
    import parquet
    from heads import Head

    with Head(tmp_path_factory.mktemp("head") / "h") as head:
        parquet.dataset(head.root / "data" / "tiny")
        yield head

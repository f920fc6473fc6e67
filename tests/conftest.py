"""What tests share: one loopback Ray cluster, and tiny Parquet datasets."""

import atexit
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

# Names in a test's module by which it is known to start processes.
STARTS = {"on_ranks", "ranks", "assert_parity", "warm", "subprocess", "multiprocessing"}
STARTS |= {"gpu_cluster", "ray_session", "heads", "hosts", "Head"}
# Modules of tests on the shared Ray that take longest: first, so that two that run at once end together.
LONGEST = ["test_driver", "test_survive", "test_out_of_tree", "test_cli", "test_warm_start", "test_check"]


def pytest_sessionstart(session):
    """After Python's own end comes that of the process, as for the command (process_exit.py)."""

    def end():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(session.exitstatus)

    atexit.register(end)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that share the Ray cluster come last, as others must find none; modules stay together."""
    for item in items:
        on_ray = "_shared_ray" in item.fixturenames
        if on_ray or STARTS & vars(item.module).keys():
            item.add_marker("processes")
        item.add_marker(pytest.mark.xdist_group(f"{item.module.__name__}{', on Ray' if on_ray else ''}"))
    items.sort(key=place_in_the_order)


def place_in_the_order(item):
    name = item.module.__name__
    on_ray = "_shared_ray" in item.fixturenames
    return on_ray, LONGEST.index(name) if on_ray and name in LONGEST else len(LONGEST)


def pytest_collection_finish(session):
    """pytest-xdist groups tests by a suffix of their names, which it could not set with pytest 9.2."""
    if session.config.getoption("loadgroup", False) and session.items:
        assert "@" in session.items[-1].nodeid, "pytest-xdist does not keep the tests of a module together"


@pytest.fixture(scope="session")
def _shared_ray():
    import ranks
    import ray
    from stores import made_once

    from raytrec.cluster import warm
    from raytrec.cluster.session import ray_session
    from raytrec.driver.warm_workers import MODULES, ON_RAY

    ranks.close_all()  # they would take a part of each core
    assert not ray.is_initialized(), "an earlier test left Ray running"
    warm.warm_up(MODULES, ON_RAY)
    try:
        with made_once(), ray_session(num_cpus=6):
            yield
    finally:
        warm.cool_down()


@pytest.fixture(scope="module")
def ray_cluster(_shared_ray):
    """A local Ray on loopback with 6 logical CPUs, which the session's tests share."""
    yield

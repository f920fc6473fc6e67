"""Fixtures shared by the tracking tests."""

import multiprocessing

import pytest


@pytest.fixture(scope="session", autouse=True)
def store_template():
    from stores import reuse_first_store

    with reuse_first_store():
        yield


@pytest.fixture(scope="session")
def preloaded_processes():
    """Return a multiprocessing context whose processes have MLflow imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["raytrec.tracking.delivery", "mlflow.store.tracking.sqlalchemy_store"])
    return context

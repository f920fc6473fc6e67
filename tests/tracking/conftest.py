"""Fixtures shared by the tracking tests."""

import multiprocessing

import pytest


@pytest.fixture(scope="session", autouse=True)
def stores():
    from stores import made_once

    with made_once():
        yield


@pytest.fixture(scope="session")
def processes():
    """Return a multiprocessing context whose processes have MLflow imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["raytrec.tracking.delivery", "mlflow.store.tracking.sqlalchemy_store"])
    return context

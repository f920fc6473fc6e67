"""What tests of tracking share."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def stores():
    from stores import made_once

    with made_once():
        yield

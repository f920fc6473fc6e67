"""A cluster that the tests of a module share."""

import pytest


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A Ray head on loopback, with parquet.dataset as data/tiny below its root."""
    import parquet
    from heads import Head

    with Head(tmp_path_factory.mktemp("head") / "h") as head:
        parquet.dataset(head.root / "data" / "tiny")
        yield head

"""MLflow SQLite stores without repeated migrations, which take 2 s of CPU time per store."""

import sqlite3
from contextlib import closing, contextmanager
from unittest.mock import patch


@contextmanager
def reuse_first_store():
    """Run migrations only for the first store of this process; later stores are copies."""
    from mlflow.store.db import utils

    make, first = utils._initialize_tables, sqlite3.connect(":memory:", check_same_thread=False)

    def make_or_copy(engine):
        with closing(sqlite3.connect(engine.url.database, timeout=60)) as file:
            if first.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                first.backup(file)
            else:
                make(engine)
                file.backup(first)

    with closing(first), patch.object(utils, "_initialize_tables", make_or_copy):
        yield

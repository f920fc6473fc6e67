"""Exports and services that several serving tests share. Tests must not change the exports."""

import pytest


@pytest.fixture(scope="session")
def served_export(tmp_path_factory):
    """Return the path of an export, next to which `small` has the same model in int8, and a table of rows."""
    from exports import train_for_export
    from test_models import ModelCase

    import raytrec

    root = tmp_path_factory.mktemp("serving")
    folder, table, _, _ = train_for_export(ModelCase("two_tower", (1, 1)), root)
    raytrec.export(folder, str(root / "small"), quantize="int8")
    return raytrec.export(folder, str(root / "export")).path, table


@pytest.fixture(scope="session")
def exports_and_table(tmp_path_factory):
    """Return the exports of a model in all precisions by name, and their rows as a table."""
    from services import export_in_all_precisions

    return export_in_all_precisions(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def service(exports_and_table, tmp_path_factory):
    """Yield a running service with two replicas of the export `whole`."""
    from services import run_service

    with run_service(exports_and_table[0]["whole"].path, 2, tmp_path_factory.mktemp("log")) as service:
        yield service

"""What tests share: one loopback Ray cluster per module, and tiny Parquet datasets."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(scope="module")
def ray_cluster():
    """A local Ray on loopback with 6 logical CPUs, ended with the module."""
    import ranks
    import ray

    from raytrec.cluster import ray_session

    ranks.close_all()  # they would take a part of each core
    assert not ray.is_initialized(), "an earlier test left Ray running"
    with ray_session(num_cpus=6):
        yield

"""A second stream delivers while a first is paused, where a worker has taken all CPUs of a node with GPUs.

That is an evaluation in the middle of training. The read tasks of a paused stream are generators that have
not ended, and what they have asked Ray for stays theirs.
"""

import parquet
import pytest
import warm
import yaml
from small import config

from raytrec.config.schema import Schema
from raytrec.driver.launch import local_cpus

ROWS = 240_000
SECONDS = 120


@pytest.fixture
def local_gpu():
    """A local Ray with as many CPUs as a run starts it with, and one GPU, as far as Ray knows; those CPUs."""
    import ray

    from raytrec.cluster.session import stay_on_loopback
    from raytrec.cluster.token import use_token

    cpus = local_cpus(config(1, {}))
    use_token(create=True)
    stay_on_loopback()
    with warm.ray_workers():
        ray.init(address="local", num_cpus=cpus, num_gpus=1, include_dashboard=False, log_to_driver=False)
        try:
            yield cpus
        finally:
            ray.shutdown()


def test_an_evaluation_reads_while_training_waits(local_gpu, tmp_path):
    import ray

    from raytrec.data.fragments import scan
    from raytrec.data.order import Order

    folder = parquet.write(tmp_path / "d", ROWS, 0, row_group=2000)
    data = scan(str(folder), Schema.parse(yaml.safe_load(parquet.SCHEMA_YAML), "test"))

    @ray.remote(num_cpus=local_gpu, num_gpus=1)
    def train():
        """Rows of the evaluation, and of the training that goes on after it."""
        import time

        from raytrec.data import stream

        stream.BLOCK_BYTES = 1 << 16  # the data are many blocks, so that a task cannot hand over all it has

        def begin(order):
            return stream.Stream(data, order, rank=0, world=1, prefetch=1, buffer_bytes=1 << 18).batches()

        training = begin(Order(1000, 6, "groups"))
        seen = int(next(training).weights.sum())
        time.sleep(3)  # its tasks have read as far ahead as they may
        evaluated = sum(int(batch.weights.sum()) for batch in begin(Order.evaluation(1000, 6)))
        return evaluated, seen + sum(int(batch.weights.sum()) for batch in training)

    assert ray.get(train.remote(), timeout=SECONDS) == (ROWS, ROWS)

"""A second stream delivers while a first is paused, where a worker has taken all CPUs of a node with GPUs.

That is an evaluation in the middle of training. The read tasks of a paused stream are generators that have
not ended, and what they have asked Ray for stays theirs.
"""

import parquet
import pytest

ROWS = 240_000
SECONDS = 120


@pytest.mark.survive
def test_an_evaluation_reads_while_training_waits(ray_with_gpus, tmp_path):
    import ray

    from raytrec.data.fragments import scan
    from raytrec.data.order import Order
    from raytrec.data.read_plans import ReadPlan

    folder = parquet.write(tmp_path / "d", ROWS, 0, row_group=2000)
    data = scan(str(folder), ReadPlan(parquet.schema()))

    has = ray.cluster_resources()

    @ray.remote(num_cpus=has["CPU"], num_gpus=has["GPU"])
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

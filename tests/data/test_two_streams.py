"""A second stream delivers batches while the first is paused and a worker holds all CPUs of a GPU node.

This is the case for an evaluation during training. The read tasks of a paused stream are unfinished
generators, which keep their Ray resources.
"""

import parquet
import pytest

ROWS = 240_000
TIMEOUT_S = 120


@pytest.mark.survive
def test_evaluation_reads_while_training_waits(ray_with_gpus, tmp_path):
    import ray

    from raytrec.data.fragments import scan
    from raytrec.data.order import Order
    from raytrec.data.read_plans import ReadPlan

    folder = parquet.write_split(tmp_path / "d", ROWS, 0, row_group=2000)
    data = scan(str(folder), ReadPlan(parquet.tiny_schema()))

    has = ray.cluster_resources()

    @ray.remote(num_cpus=has["CPU"], num_gpus=has["GPU"])
    def train():
        """Return the number of rows of the evaluation and of the training around it."""
        import time

        from raytrec.data import stream

        stream.BLOCK_BYTES = 1 << 16  # many small blocks: a read task cannot deliver all of its data

        def begin(order):
            return stream.Stream(data, order, rank=0, world=1, prefetch=1, buffer_bytes=1 << 18).batches()

        training = begin(Order(1000, 6, "groups"))
        seen = int(next(training).weights.sum())
        time.sleep(3)  # until the read tasks have filled their buffers
        evaluated = sum(int(batch.weights.sum()) for batch in begin(Order.evaluation(1000, 6)))
        return evaluated, seen + sum(int(batch.weights.sum()) for batch in training)

    assert ray.get(train.remote(), timeout=TIMEOUT_S) == (ROWS, ROWS)

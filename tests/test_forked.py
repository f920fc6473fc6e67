"""Tests that processes forked by warm.py have separate state."""


def test_forked_ray_workers_create_unique_object_ids(ray_cluster):
    """Workers forked after Ray was imported would all start with the same object ids and mix up objects."""
    import ray

    @ray.remote(num_cpus=0)
    class Worker:
        def ids(self):
            import os
            import sys

            return os.getpid(), "torchrec" in sys.modules, ray.ObjectRef.from_random().hex()

    workers = [Worker.remote() for _ in range(3)]
    pids, warm, ids = zip(*ray.get([worker.ids.remote() for worker in workers], timeout=60), strict=True)
    assert all(warm)
    assert len(set(pids)) == len(set(ids)) == 3

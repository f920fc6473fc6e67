"""The processes that warm.py forks are separate processes."""


def test_workers_of_ray_give_out_different_ids(ray_cluster):
    """Forked after Ray was imported, they would all begin with the same ones, and mistake objects."""
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

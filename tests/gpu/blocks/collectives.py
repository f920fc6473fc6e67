"""1: NCCL and gloo collectives return correct results and listen only on loopback."""

from __future__ import annotations

from here import BlockContext, run_on_gpus


def run(here: BlockContext) -> None:
    import torch

    with here.group():
        check_collectives(here.device)
        here.found["listens"] = listening = _listening()
    outside = [place for place in listening if not place.startswith(("127.", "::1"))]
    assert not outside, f"this process listens on {outside}, beyond loopback"
    gpus = torch.cuda.device_count() if here.kind == "cuda" else 0
    if gpus > 1:
        run_on_gpus(here, gpus, check_collectives)
        here.found["ranks"] = gpus
    elif gpus:
        here.found["ranks"] = "1: NCCL rejects two ranks on one GPU, so no data was exchanged between GPUs"


def check_collectives(device) -> None:
    """Run every collective that raytrec and TorchRec use and check its result."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.full((3,), float(rank + 1), device=device)
    total = mine.clone()
    dist.all_reduce(total)
    assert total.tolist() == [world * (world + 1) / 2] * 3
    parts = torch.empty(3 * world, device=device)
    dist.all_gather_into_tensor(parts, mine)
    assert parts[::3].tolist() == [float(r + 1) for r in range(world)]
    sent = torch.arange(2 * world, device=device) + 100 * rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    assert received.tolist() == [100 * r + 2 * rank + i for r in range(world) for i in range(2)]
    gathered = [torch.empty_like(mine) for _ in range(world)] if rank == 0 else None
    dist.gather(mine, gathered)
    assert rank or [g[0].item() for g in gathered] == [r + 1 for r in range(world)]
    side = dist.new_group(backend="gloo")
    for group in (None, side):
        box = [{"from": 0} if rank == 0 else None]
        dist.broadcast_object_list(box, group=group)
        everyone: list = [None] * world
        dist.all_gather_object(everyone, rank, group=group)
        assert box == [{"from": 0}] and everyone == list(range(world))
    on_host = torch.ones(2, dtype=torch.int64)
    dist.all_reduce(on_host, group=side)
    assert on_host.tolist() == [world, world]


def _listening() -> list[str]:
    """Return the addresses that this process listens on."""
    import psutil

    found = psutil.Process().net_connections(kind="inet")
    return sorted({f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN})

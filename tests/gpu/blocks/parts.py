"""2: live checks, hashes and checkpoints read device state correctly; batches are copied to the device."""

from __future__ import annotations

from here import BlockContext


def run(here: BlockContext) -> None:
    with here.group():
        step, state = _trained(here)
        _checks_pass(here, step, state)
        _hashes_agree(state)
        _initial_values_agree(here)
        _checkpoint_is_equal(here, state)
        if here.kind == "cuda":
            _copies_keep_their_memory(here)


def _config(seed: int):
    import small

    config = small.make_small_config(1, {"sharding_type": "row_wise"}, "adagrad")
    config.optim.dense.name, config.run.seed = "adam", seed  # Adam's count of steps is on the CPU
    return config


def _trained(here: BlockContext, seed: int = 3):
    import small

    from raytrec.checkpoint.state import LogicalState

    step = small.build_step_on_rank(_config(seed), device=here.device)
    small.train_step(step, small.make_batches(3, 0, 1)[1])
    return step, LogicalState(step.model, step.optimizer)


def _checks_pass(here: BlockContext, step, state) -> None:
    import small

    from raytrec.checks.live.outcome import CHECKPOINT, START, CheckedRun, Position
    from raytrec.checks.live.registry import LiveChecks
    from raytrec.embeddings.taps import Taps

    head = step.head
    taps = Taps(step.model, head, list(small.SCHEMA.sparse))
    parameters = dict(head.model.named_parameters())
    run = CheckedRun(_config(3), small.SCHEMA, state.tables, state.dense, taps, here.device, parameters)
    checks = LiveChecks(run)
    outcomes = checks.evaluate(START, Position(0, about={"versions": "any"}))
    outcomes += checks.evaluate(CHECKPOINT, Position(3))
    here.found["checks"] = sorted({outcome.check for outcome in outcomes})
    failed = [outcome.text for outcome in outcomes if not outcome.passed]
    assert not failed, "; ".join(failed)


def _hashes_agree(state) -> None:
    from raytrec.checks.live.agreement import fingerprint

    for name, value in state.dense.items():
        here, host = int(fingerprint(value)), int(fingerprint(value.cpu()))
        assert here == host, f"{name} has hash {here} on {value.device} and {host} on cpu"


def _initial_values_agree(here: BlockContext) -> None:
    """Check that initial values computed on the device equal those of the CPU bit for bit."""
    import torch

    from raytrec.embeddings.hashing import compute_initial_values

    ids = torch.cat([torch.arange(5000), torch.arange(-9, 9) * 2**59])
    expected = compute_initial_values(3, "user", ids, range(3, 24), 1000)
    found = compute_initial_values(3, "user", ids.to(here.device), range(3, 24), 1000)
    assert found.device.type == here.device.type, f"made on {found.device}"
    assert torch.equal(found.cpu(), expected), "initial values differ between the device and the CPU"


def _checkpoint_is_equal(here: BlockContext, state) -> None:
    """Save in the background thread, load into another model, and compare bit for bit."""
    import torch
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    from raytrec.checkpoint.save import CheckpointWriter
    from raytrec.checkpoint.storage import load
    from raytrec.config.training import CheckpointSection

    tensors = state.tensors()
    for name, value in tensors.items():
        for shard in value.local_shards() if isinstance(value, ShardedTensor) else []:
            claimed, lies = shard.metadata.placement.device(), shard.tensor.device
            assert claimed == lies, f"{name} is on {lies}, but its metadata names {claimed}"
    saver = CheckpointWriter(str(here.folder / "checkpoints"), CheckpointSection(every_s=None))
    for number in (3, 4):  # the second save reuses the buffers of the first
        saver.save(number, tensors, {})
        saved = saver.collect_outcome()
        assert saved.error is None, str(saved.error)
    _, other = _trained(here, seed=4)
    into = other.tensors()
    assert any(not torch.equal(_local(into[n]), _local(v)) for n, v in tensors.items())
    load(saved.folder, into)
    other.refresh_kernels()
    differ = [n for n, v in tensors.items() if not torch.equal(_local(other.tensors()[n]), _local(v))]
    assert not differ, f"loaded values differ from the saved values: {differ}"
    here.found["tensors"] = len(tensors)


def _local(value):
    """Return the values of this rank on the CPU."""
    import torch
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    if isinstance(value, ShardedTensor):
        return torch.cat([shard.tensor.detach().reshape(-1).cpu() for shard in value.local_shards()])
    return value.detach().reshape(-1).cpu()


def _copies_keep_their_memory(here: BlockContext) -> None:
    """Check that record_stream protects batches copied on a side stream from reuse of their memory."""
    from dataclasses import replace

    import small
    import torch

    (batch,) = small.make_batches(1, 0, 1)[1]
    side, sums = torch.cuda.Stream(), []
    rounds = here.size(4, 4, 200)
    for number in range(rounds):
        wide = torch.full((12, 4096), float(number))
        with torch.cuda.stream(side):
            there = replace(batch, dense=wide).pin_memory().to(here.device, non_blocking=True)
        current = torch.cuda.current_stream()
        current.wait_stream(side)
        there.record_stream(current)
        torch.cuda._sleep(2_000_000)  # about 1 ms, so that the host runs ahead
        sums.append((there.dense.mean() + there.sparse.values().sum()).float())
        del there
        with torch.cuda.stream(side):  # overwrites the batch if its memory was freed
            torch.full((12, 4096), -1.0, device=here.device)
    ids = float(batch.sparse.values().sum())
    expected = [number + ids for number in range(rounds)]
    assert torch.stack(sums).tolist() == expected, "a batch was overwritten before it was read"

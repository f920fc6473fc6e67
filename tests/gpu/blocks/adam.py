"""6: evaluation between steps does not change training; fused Adam must not count evaluation forwards."""

from __future__ import annotations

from here import BlockCannotRun, BlockContext

STEPS, EVALUATIONS = 40, 20


def run(here: BlockContext) -> None:
    import torch

    if here.stand_in:
        raise BlockCannotRun("a stand-in has no fused Adam")
    with here.group():
        undisturbed, evaluated = _trained(here, False), _trained(here, True)
    for name, expected in undisturbed.items():
        apart = float((evaluated[name] - expected).abs().max())
        assert torch.equal(evaluated[name], expected), (
            f"{name} differs by {apart:.2g} if the model is evaluated between steps"
        )
    here.found["tensors"] = len(undisturbed)


def _trained(here: BlockContext, evaluate: bool) -> dict:
    """Return the tables and their optimizer state after STEPS steps."""
    import small

    from raytrec.embeddings.tables import tables

    config = small.make_small_config(1, {"sharding_type": "row_wise"}, "adam", lr=0.01)
    step = small.build_step_on_rank(config, device=here.device)
    batches, every = small.make_batches(STEPS, 0, 1)[1], STEPS // EVALUATIONS
    for start in range(0, STEPS, every):
        small.train_step(step, batches[start : start + every])
        if evaluate:
            assert len(list(step.evaluate(iter(batches[:1])))) == 1
    found = tables(step.model, step.optimizer)
    out = {f"table {name}": table.weight.dense().cpu() for name, table in found.items()}
    return out | {f"{n}'s {k}": p.dense().cpu() for n, t in found.items() for k, p in t.state.items()}

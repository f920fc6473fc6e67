"""9: step phases are not negative, add up to the step time, and show an injected data delay."""

from __future__ import annotations

from time import perf_counter, sleep

from here import BlockContext

DATA_DELAY_S, STEPS = 0.02, 40
MAX_UNTIMED_STEPS = 300  # steps without reading the phases


def run(here: BlockContext) -> None:
    import small

    with here.group():
        step = small.build_step_on_rank(small.make_small_config(1, {"sharding_type": "row_wise"}), device=here.device)
        batches = small.make_batches(20, 0, 1)[1]
        small.train_step(step, batches)  # warm-up
        step.phases.take()
        wall, planted, taken = _timed(here, step, batches)
        small.train_step(step, batches * (here.size(40, MAX_UNTIMED_STEPS, MAX_UNTIMED_STEPS) // len(batches)))
        later = step.phases.take()
    here.found |= {"wall_s": wall, **{f"{name}_s": round(s, 4) for name, s in taken.items()}}
    for name, seconds in [*taken.items(), *later.items()]:
        assert seconds >= 0, f"phase {name} took {seconds:.4f} s"
    total, waited = sum(taken.values()), taken["data"]
    assert abs(total - wall) < 0.05 * wall + 0.01, f"phases add up to {total:.3f} s, the steps took {wall:.3f} s"
    assert abs(waited - planted) < 0.2 * planted, (
        f"the data phase took {waited:.2f} s, but the injected delay was {planted:.2f} s"
    )


def _timed(here: BlockContext, step, batches) -> tuple[float, float, dict[str, float]]:
    """Train on delayed batches; return (seconds, seconds of injected delay, phases)."""
    slept = 0.0

    def late():
        nonlocal slept
        for number in range(STEPS):
            before = perf_counter()
            sleep(DATA_DELAY_S)
            slept += perf_counter() - before
            yield batches[number % len(batches)]

    here.wait()
    began = perf_counter()
    for _ in step.train(late(), STEPS):
        pass
    here.wait()
    return perf_counter() - began, slept, step.phases.take()

"""9: the phases of a step are not negative, add up to its time, and find a wait planted in the data."""

from __future__ import annotations

from time import perf_counter, sleep

from here import Here

SLEEP_S, STEPS = 0.02, 40
MANY = 300  # steps without a look at the clock


def run(here: Here) -> None:
    import small

    from raytrec.train.build import build_step

    with here.group():
        step, _ = build_step(small.config(1, {"sharding": "row_wise"}), small.SCHEMA, here.device)
        batches = small.batches(20, 0, 1)[1]
        small.train(step, batches)  # the first steps set everything up
        step.phases.take()
        wall, taken = _timed(here, step, batches)
        small.train(step, batches * (here.size(40, MANY, MANY) // len(batches)))
        later = step.phases.take()
    here.found |= {"wall_s": wall, **{f"{name}_s": round(s, 4) for name, s in taken.items()}}
    for name, seconds in [*taken.items(), *later.items()]:
        assert seconds >= 0, f"phase {name} took {seconds:.4f} s"
    total, planted = sum(taken.values()), SLEEP_S * STEPS
    assert abs(total - wall) < 0.05 * wall + 0.01, (
        f"phases add up to {total:.3f} s, the steps took {wall:.3f} s"
    )
    waited = taken["data"]
    assert 0.8 * planted < waited < 1.5 * planted, (
        f"data took {waited:.2f} s, where {planted:.2f} s were planted"
    )


def _timed(here: Here, step, batches) -> tuple[float, dict[str, float]]:
    """(seconds, phases) of steps whose batches come late."""

    def late():
        for number in range(STEPS):
            sleep(SLEEP_S)
            yield batches[number % len(batches)]

    here.wait()
    began = perf_counter()
    for _ in step.train(late(), STEPS):
        pass
    here.wait()
    return perf_counter() - began, step.phases.take()

"""7: a loss that is not finite ends the run, in its last step, too, and its state is never saved."""

from __future__ import annotations

import re

from here import Here


def run(here: Here) -> None:
    with here.ray():
        step, kept = _diverged(here, "diverges", None)
        here.found |= {"step": step, "newest_checkpoint": kept}
        assert kept < step, (
            f"the loss of step {step} was not finite, and there is a checkpoint of step {kept}"
        )
        # The same again, with that step as the last one, after which no other one could find it.
        last, kept = _diverged(here, "at_the_end", step)
    assert last == step, f"the loss was not finite at step {step}, and now at step {last}"
    assert kept < step, f"the loss of the last step, {step}, was not finite, and there is a checkpoint of it"


def _diverged(here: Here, name: str, max_steps: int | None) -> tuple[int, int]:
    """(step whose loss was not finite, step of the newest checkpoint) of a run that saves after each step and
    whose dense layers overflow within a few."""
    import checkpoints

    from raytrec.common.errors import RunError
    from raytrec.driver import run as driver

    values = here.settings(
        name, checkpoint__every_steps=1, train__max_steps=max_steps, tracking__every_steps=None
    )
    values["optim"] = {"dense": {"name": "sgd", "lr": 1e9}}
    values["checks"] = {"finite": "off", "numerics": "off"}
    try:
        driver.train(values)
    except RunError as error:
        assert "not a finite number" in str(error), str(error)
        step = int(re.search(r"step (\d+);", str(error))[1])
    else:
        raise AssertionError("a run whose loss is not finite ended well")
    run = here.folder / name
    saved = list((run / "checkpoints").glob("step-*/checkpoint.json"))
    newest = checkpoints.about(checkpoints.newest(run))["progress"]["step"] if saved else 0
    return step, newest

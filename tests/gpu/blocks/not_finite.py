"""7: a non-finite loss ends the run (also in the last step) before a checkpoint is saved."""

from __future__ import annotations

import re

from here import BlockContext


def run(here: BlockContext) -> None:
    with here.ray():
        step, kept = _diverged(here, "diverges", None)
        here.found |= {"step": step, "newest_checkpoint": kept}
        assert kept < step, f"the loss of step {step} was not finite, but a checkpoint of step {kept} was saved"
        # Repeat with this step as the last one: no later step can detect the non-finite loss.
        last, kept = _diverged(here, "at_the_end", step)
    assert last == step, f"the loss was not finite at step {step}, and now at step {last}"
    assert kept < step, f"the loss of the last step ({step}) was not finite, but its checkpoint was saved"


def _diverged(here: BlockContext, name: str, max_steps: int | None) -> tuple[int, int]:
    """Train a run that diverges within a few steps and saves after each step.

    Return (step with the non-finite loss, step of the newest checkpoint).
    """
    import checkpoints

    from raytrec.common.errors import RunError
    from raytrec.driver import run as driver

    values = here.settings(name, checkpoint__every_steps=1, train__max_steps=max_steps, tracking__every_steps=None)
    values["optim"] = {"dense": {"name": "sgd", "lr": 1e9}}
    values["checks"] = {"finite": "off", "numerics": "off"}
    try:
        driver.train(values)
    except RunError as error:
        assert "not a finite number" in str(error), str(error)
        step = int(re.search(r"step (\d+);", str(error))[1])
    else:
        raise AssertionError("a run with a non-finite loss ended without an error")
    run = here.folder / name
    saved = list((run / "checkpoints").glob("step-*/checkpoint.json"))
    newest = checkpoints.read_about(checkpoints.newest_checkpoint(run))["progress"]["step"] if saved else 0
    return step, newest

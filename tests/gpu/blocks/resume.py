"""5: resuming halfway gives the same model, and both devices evaluate a model to the same AUC."""

from __future__ import annotations

import shutil
from pathlib import Path

from here import BlockContext

AUC_TOLERANCE = 1e-5  # AUC difference allowed between devices


def run(here: BlockContext) -> None:
    """Run with scaling.device: auto, so that the GPUs registered in Ray determine the device."""
    import checkpoints

    from raytrec.driver import run as driver
    from raytrec.driver.evaluation import evaluate

    test = str(here.data / "test")
    with here.ray():
        whole = driver.train(_settings(here, "whole"))
        auc = whole.metrics["eval.auc"]
        here.found |= {"eval.auc": auc, "steps": whole.metrics["train.steps"]}
        resumed = driver.train(None, resume=copy_without_last_checkpoint(whole.path, here.folder / "resumed"))
        differ = checkpoints.differing_tensors(
            checkpoints.newest_checkpoint(whole.path), checkpoints.newest_checkpoint(resumed.path)
        )
        assert not differ, f"the resumed run ends with different values of {', '.join(differ)}"
        assert resumed.metrics["eval.auc"] == auc, f"AUC {resumed.metrics['eval.auc']} instead of {auc}"
    if here.kind == "cpu":
        return
    with here.ray("cpu"):
        _same_auc(evaluate(whole.path, test), auc, "cpu, of a model from cuda")
        on_cpu = driver.train(_settings(here, "cpu", steps=20))
    with here.ray("cuda"):
        expected = on_cpu.metrics["eval.auc"]
        _same_auc(evaluate(on_cpu.path, test), expected, "cuda, of a model from cpu")


def _settings(here: BlockContext, name: str, steps: int = 60) -> dict:
    """Return settings with a checkpoint halfway and deterministic arithmetic."""
    return here.settings(
        name,
        scaling__device="auto",
        train__max_steps=here.size(16, 16, steps),
        train__deterministic=True,
        checkpoint__every_steps=here.size(8, 8, steps // 2),
    )


def copy_without_last_checkpoint(run: Path, to: Path) -> Path:
    """Copy a run without its result and its newest checkpoint."""
    import checkpoints

    shutil.copytree(run, to)
    (to / "result.json").unlink()
    shutil.rmtree(checkpoints.newest_checkpoint(to))
    return to


def _same_auc(result, expected: float, where: str) -> None:
    auc = result.metrics["eval.auc"]
    assert abs(auc - expected) < AUC_TOLERANCE, f"AUC {auc:.6f} evaluated on {where}; expected {expected:.6f}"

"""14: short runs with managed ids, EMA, compiled layers, predictions, quantized collectives, fewer ranks."""

from __future__ import annotations

from pathlib import Path

from here import BlockContext, read_json_records

PREDICTION_AUC_TOLERANCE = 1e-5  # AUC difference allowed between an evaluation and predictions of the same model
LOW_PRECISION_AUC_TOLERANCE = 2e-2  # AUC difference allowed between fp32 and bf16 layers or 16-bit collectives


def run(here: BlockContext) -> None:
    import torch

    with here.ray():
        plain = _train(here, "plain")
        managed = _train(here, "managed", data__schema=_managed_schema(here), train__ema=0.99)
        _predictions_are_those_evaluated(here, managed)
        if here.real:
            compiled = _train(here, "compiled", train__compile=True, train__matmul="bf16")
            _near(compiled, plain, "compiled in bf16")
            graphs = _train(here, "graphs", train__compile="graphs")
            _near(graphs, plain, "compiled, as CUDA graphs")
        if here.real and torch.cuda.device_count() > 1:
            _on_two(here, plain)


def _train(here: BlockContext, name: str, **changes):
    """Train and evaluate a run; assert that all live checks pass."""
    from raytrec.driver import run as driver

    every = here.size(8, 8, 40)
    settings = {"train__max_steps": 3 * every, "train__eval_every_steps": 2 * every, "checks__every_steps": every}
    result = driver.train(here.settings(name, **settings, **changes))
    failed = [line["text"] for line in read_json_records(result.path / "checks.jsonl") if not line["passed"]]
    assert not failed, f"{name}: {failed}"
    here.found[f"auc of {name}"] = result.metrics["eval.auc"]
    return result


def _managed_schema(here: BlockContext) -> str:
    """Write a schema whose first table has managed ids and fewer rows than ids; return its path."""
    import yaml

    schema = yaml.safe_load((here.data / "schema.yaml").read_text())
    table = schema["tables"][next(iter(schema["tables"]))]
    table |= {"ids": "managed", "rows": max(64, table["rows"] // 4)}
    path = here.folder / "managed.yaml"
    path.write_text(yaml.safe_dump(schema))
    return str(path)


def _predictions_are_those_evaluated(here: BlockContext, run) -> None:
    import numpy as np
    import pyarrow.parquet as pq

    import raytrec

    (label,) = raytrec.Schema.load(here.data / "schema.yaml").labels
    out = raytrec.predict(run.path, str(here.data / "test"), str(here.folder / "scores"), columns=[label])
    table = pq.read_table(out.path)
    scores, labels = table["score"].to_numpy(), table[label].to_numpy() > 0
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[places]  # ties get their mean rank
    ones = labels.sum()
    auc = (ranks[labels].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones))
    apart = abs(auc - run.metrics["eval.auc"])
    assert apart < PREDICTION_AUC_TOLERANCE, (
        f"AUC of predictions {auc:.6f}, AUC of evaluation {run.metrics['eval.auc']:.6f}"
    )


def _near(run, plain, what: str) -> None:
    apart = abs(run.metrics["eval.auc"] - plain.metrics["eval.auc"])
    assert apart < LOW_PRECISION_AUC_TOLERANCE, (
        f"AUC {run.metrics['eval.auc']:.4f} {what}, {plain.metrics['eval.auc']:.4f} plain"
    )


def _on_two(here: BlockContext, plain) -> None:
    """Train on two GPUs with 16-bit collectives, and resume a run of two GPUs on one."""
    from blocks.resume import copy_without_last_checkpoint
    from raytrec.driver import run as driver

    both = {"scaling__num_workers": 2}
    coarse = {"forward_precision": "fp16", "backward_precision": "bf16"}
    _near(_train(here, "quantized", plan__qcomms=coarse, **both), plain, "with quantized collectives")
    whole = _train(here, "two", checkpoint__every_steps=here.size(8, 8, 40), **both)
    half = copy_without_last_checkpoint(whole.path, Path(here.folder, "one"))
    fewer = driver.train(None, ["scaling.num_workers=1"], resume=half)
    apart = abs(fewer.metrics["eval.auc"] - whole.metrics["eval.auc"])
    assert apart < 2e-3, (
        f"AUC {fewer.metrics['eval.auc']:.5f} resumed on one GPU, {whole.metrics['eval.auc']:.5f} on two"
    )

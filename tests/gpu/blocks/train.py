"""4: a complete run reads Parquet through a buffer smaller than the data and evaluates while training."""

from __future__ import annotations

from here import BlockContext, read_json_records

DEVICE_AUC_TOLERANCE = 2e-3  # AUC difference allowed between GPU and CPU


def run(here: BlockContext) -> None:
    from raytrec.driver import run as driver

    with here.ray():
        result = driver.train(_settings(here, "train", here.kind))
    folder, figures = result.path, result.metrics
    here.found |= {name: figures[name] for name in ("eval.auc", "eval.ne", "train.samples_per_s", "seconds")}
    (here.shared / "train.run").write_text(str(folder))
    troubles = [e for e in read_json_records(folder / "events.jsonl") if e["event"] in ("hang", "failed")]
    assert not troubles, f"{troubles[0]['event']}: {troubles[0].get('cause')}"
    checks = read_json_records(folder / "checks.jsonl")
    failed = [c["text"] for c in checks if not c["passed"]]
    assert checks and not failed, f"checks failed: {failed}" if failed else "no checks were made"
    evaluated = [line for line in read_json_records(folder / "metrics.jsonl") if line["kind"] == "eval"]
    here.found |= {"checks": len(checks), "evaluations": len(evaluated)}
    assert len(evaluated) >= 2, f"{len(evaluated)} evaluations during training, expected at least 2"
    assert figures["eval.auc"] > here.size(0.55, 0.6, 0.7), f"AUC {figures['eval.auc']} is too low"
    if here.kind == "cuda":
        with here.ray("cpu"):
            on_cpu = driver.train(_settings(here, "cpu", "cpu")).metrics
        here.found["eval.auc on cpu"] = on_cpu["eval.auc"]
        apart = abs(figures["eval.auc"] - on_cpu["eval.auc"])
        assert apart < DEVICE_AUC_TOLERANCE, f"AUC {figures['eval.auc']:.5f} on GPU, {on_cpu['eval.auc']:.5f} on CPU"


def _settings(here: BlockContext, name: str, device: str) -> dict:
    return here.settings(
        name,
        scaling__device=device,
        data__buffer_gib=0.01,
        data__readers=here.size(1, 1, 4),
        train__eval_every_steps=here.size(8, 8, 40),
        checks__every_steps=here.size(8, 8, 40),
        tracking__report=name == "train",
    )

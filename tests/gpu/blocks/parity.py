"""3: the sharded model matches plain torch in forward, gradients, weights and optimizer state."""

from __future__ import annotations

from here import BlockContext, run_on_gpus

ROWS, STEPS = 24, 20  # rows of a global batch; training steps before weights and state are compared
# UVM cases use tiny tables: managed memory larger than the free GPU memory can freeze the machine.
UVM_KERNELS = ("fused_uvm", "fused_uvm_caching")


def run(here: BlockContext) -> None:
    import torch

    wanted = single_process_cases("cuda" if here.real else "cpu")
    with here.group():
        worst = compare_all(here.device, wanted[: here.size(3, 40, 40)] + model_cases()[: here.size(1, 40, 40)])
        _bf16_is_refused(here)
    here.found |= {"cases": len(worst), "worst_share_of_the_limit": max(worst.values())}
    here.found["worst_case"] = max(worst, key=worst.get)
    gpus = torch.cuda.device_count() if here.kind == "cuda" else 0
    if gpus > 1:
        world = min(gpus, 3)  # like `make parity` on one host
        several = run_on_gpus(here, world, compare_all, sharded_cases(world))
        here.found |= {"ranks": world, "cases_on_several": len(several)}
        worst |= several
    wrong = [f"{case}: {share:.3g} × the limit" for case, share in worst.items() if not share <= 1]
    assert not wrong, "; ".join(wrong)


def single_process_cases(kind: str) -> list:
    """Return the single-process cases for a device kind."""
    from design import Case

    def case(optimizer="adagrad", sharding="table_wise", pooling="mixed", **extras):
        return Case(sharding, pooling, optimizer, (1, 1), "equal", **extras)

    optimizers = ("sgd", "rowwise_adagrad", "adagrad", "adam")
    found = [case(kernel="fused"), case("rowwise_adagrad", max_grad_norm=0.05), case("adam", kernel="dense")]
    found += [case(o, kernel=kernel) for o in optimizers for kernel in ("fused", "dense")]
    found += [case("sgd", pooling=p, sharding="row_wise") for p in ("sum", "mean", "weighted sum", "weighted mean")]
    found += [case(o, dtype="fp16") for o in ("sgd", "adagrad")]
    found += [case(o, kernel=kernel) for o in ("rowwise_adagrad", "adam") for kernel in UVM_KERNELS]
    found += [
        case("adagrad", max_grad_norm=0.05, recomputed=True),
        case("adam", sharding="data_parallel", kernel="dense"),
    ]
    fused_adam = [c for c in found if kind == "cpu" and c.optimizer == "adam" and c.kernel != "dense"]
    return [c for c in dict.fromkeys(found) if c not in fused_adam]  # FBGEMM has no fused Adam on CPU


def model_cases() -> list:
    """Return a case for every model of the registry, sequence models first."""
    from test_models import CASES, ModelCase

    by_sequences = sorted(CASES, key=lambda model: "max_length" not in CASES[model][1])
    return [ModelCase(model, (1, 1)) for model in by_sequences]


def sharded_cases(world: int) -> list:
    """Return a case for every sharding type on several GPUs of one host."""
    from design import FACTORS, Case

    ways = [(way, "mixed", "adagrad", (world, 1), "unequal") for way in FACTORS["sharding"]]
    return [Case(*way, kernel="dense" if way[0] == "data_parallel" else "fused") for way in ways] + [
        Case("row_wise", "weighted mean", "sgd", (world, 1), "empty"),
        Case("row_wise", "mixed", "rowwise_adagrad", (world, 1), "unequal", max_grad_norm=0.05, recomputed=True),
    ]


def compare_all(device, wanted: list) -> dict[str, float]:
    """Return case → largest error as a share of its limit, on rank 0. NaN errors fail."""
    from math import nan

    from raytrec.checks.parity.compare import compare
    from raytrec.worker.build import build_step

    out = {}
    for seed, case in enumerate(wanted):
        print(case, flush=True)
        found = compare(
            build_step, case.config(), case.schema(), device, rows=ROWS, steps=STEPS, balance=case.balance, seed=seed
        )
        shares = [f.error / f.limit for f in found]
        out[f"{case}, {getattr(case, 'dtype', 'fp32')}"] = (
            nan if any(s != s for s in shares) else max(shares, default=0.0)
        )
    return out


def _bf16_is_refused(here: BlockContext) -> None:
    """Check that raytrec rejects bf16 tables, for which FBGEMM has no kernels, before building the model."""
    from raytrec.common.errors import ConfigError
    from raytrec.config.run_config import load_config
    from raytrec.planning.validation import validate_constraints

    case = single_process_cases(here.kind)[0]
    values = case.config().model_dump(by_alias=True)
    try:
        config = load_config(values, ["plan.tables={'*': {kernel: fused, dtype: bf16}}"])
        validate_constraints(config, case.schema(), here.kind, world=1)
    except ConfigError as error:
        assert "bf16" in str(error), str(error)
        return
    raise AssertionError(f"bf16 tables are not rejected on {here.kind}")

"""A training loop on ranks with live checks and injected faults."""

from dataclasses import dataclass, field
from typing import Any

from small import SCHEMA, make_batches, make_small_config

ROW_WISE, DATA_PARALLEL = {"sharding_type": "row_wise"}, {"sharding_type": "data_parallel"}
SHARDING_PLANS = {
    "row-wise": ROW_WISE,
    "table-wise": {"sharding_type": "table_wise"},
    "column-wise": {"sharding_type": "column_wise"},
    "table-row-wise": {"sharding_type": "table_row_wise"},
    "table-column-wise": {"sharding_type": "table_column_wise"},
    "grid": {"sharding_type": "grid_shard"},
    "data-parallel": DATA_PARALLEL,
    "dense": {"sharding_type": "row_wise", "compute_kernel": "dense"},
    "fp16": {"sharding_type": "table_wise", "dtype": "fp16"},
}
CHECKPOINT_ABOUT = {"config": "a: 1", "schema": "tables: {}", "torch": "2.13.0"}


@dataclass
class FaultContext:
    """State of one rank that a fault can change.

    A fault is a function of a Scene and is called on every rank. It can return a function that is called at
    the end to undo global changes.
    """

    rank: int
    world: int
    step: Any
    taps: Any = None
    state: Any = None
    checks: Any = None
    local: list = field(default_factory=list)
    about: dict = field(default_factory=lambda: dict(CHECKPOINT_ABOUT))

    @property
    def head(self):

        return self.step.head

    def modules(self, kind):
        return [m for m in self.step.model.modules() if type(m).__name__ == kind]


def train_with_checks(
    rank, world, plan, fault=None, after=4, *, optimizer="sgd", steps=6, every=3, balance="unequal", lr=0.1,
    schema=SCHEMA, checks=None, dense=None, model=None, tasks=None, device="cpu",
    qcomms=None, **train,
):  # fmt: skip
    """Train and run live checks at the start, every `every` steps, and at the end; return all outcomes.

    Args:
        fault: function of a Scene, called after `after` steps (0: before the checks are created).
    """
    import torch

    from raytrec.checkpoint.state import LogicalState
    from raytrec.checks.live.outcome import CHECKPOINT, START, STEP, CheckedRun, Position
    from raytrec.checks.live.registry import LiveChecks
    from raytrec.config.data import TaskSection
    from raytrec.config.features import resolve_features
    from raytrec.config.tables import QCommsSection
    from raytrec.embeddings.taps import Taps
    from raytrec.tasks.task import resolve_tasks
    from raytrec.worker.build import build_step

    settings = make_small_config(world, plan, optimizer, lr, **train)
    settings.optim.dense.name = dense or settings.optim.dense.name
    settings.model = model or settings.model
    settings.tasks = [TaskSection(**task) for task in tasks or [{}]]
    settings.plan.qcomms = QCommsSection(**qcomms or {})
    features = resolve_features(schema, settings.model)
    for name, reaction in (checks or {}).items():
        setattr(settings.checks, name, reaction)
    scene = FaultContext(rank, world, build_step(settings, schema, torch.device(device))[0])
    learned = resolve_tasks(settings.tasks, schema)
    whole, scene.local = make_batches(steps, rank, world, balance, schema, features, learned)
    for number, batch in enumerate(scene.local):
        batch.step = number
    undo = fault(scene) if fault and after == 0 else None
    try:
        scene.state = LogicalState(scene.step.model, scene.step.optimizer)
        scene.taps = Taps(scene.step.model, scene.head, list(schema.sparse))
        parameters = dict(scene.head.named_parameters())
        checked = CheckedRun(
            settings,
            schema,
            scene.state.tables,
            scene.state.dense,
            scene.taps,
            torch.device(device),
            parameters,
            maps=scene.step.maps,
        )
        scene.checks = LiveChecks(checked)
        outcomes, rows = scene.checks.evaluate(START, Position(0, about=scene.about)), 0
        stream = (scene.local[i] for i in range(steps))  # lazy: read when the pipeline needs them
        for done, _ in enumerate(scene.step.train(stream, steps), start=1):
            rows += len(whole[done - 1])
            if scene.taps.is_probing:
                position = Position(done, scene.taps.input.batch.step, rows)
                outcomes += scene.checks.evaluate(STEP, position)
                scene.taps.forget()
            if fault and done == after:
                undo = fault(scene)
            if (done + 1) % every == 0 and done < steps:
                scene.taps.is_probing = scene.checks.probes
                scene.checks.prepare(scene.local[done])
        outcomes += scene.checks.evaluate(CHECKPOINT, Position(steps, None, rows))
        return [outcome.line() for outcome in outcomes]
    finally:
        if undo:
            undo()


def failed_outcomes(answers, check=None):
    """Return the failed outcomes. The answers of all ranks must be equal."""
    assert all(answer == answers[0] for answer in answers), "the outcomes of the ranks differ"
    return [o for o in answers[0] if not o["passed"] and check in (None, o["check"])]


def run_with_fault(rank, world, plan, fault, settings):
    return train_with_checks(rank, world, plan, fault, **settings)


def only_failed_text(answers, check, step=6):
    """Return the text of a check that must be the only one to fail at a step, and not earlier."""
    found = [o for o in failed_outcomes(answers) if o["step"] == step]
    assert found and {o["check"] for o in found} == {check}, found
    assert failed_outcomes(answers)[0]["step"] == step, "a check failed before the fault was injected"
    return found[0]["text"]

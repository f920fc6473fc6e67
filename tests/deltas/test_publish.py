"""Deltas of a training run, applied by the reader of docs/online.md and by raytrec's, lead to the run's states."""

import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import loop
import numpy as np
import pytest
import torch
from checkpoints import flip_lowest_bit, read_about
from disks import fill_disk, small_disk
from managed_ids import TABLES, managed_schema
from ranks import run_on_ranks
from small import SCHEMA, make_small_schema

from raytrec.common.errors import ConfigError, DataError
from raytrec.deltas.apply import read_delta
from raytrec.deltas.chain import Position
from raytrec.deltas.format import read_delta_manifest

STEPS, EVERY = 10, 4  # steps of a run, and between its checkpoints
MANAGED_STEPS, MANAGED_EVERY = 18, 8  # the pipeline is drained before a delta, which takes a few steps
PAGE = Path(__file__).parents[2] / "docs/online.md"
(READER,) = re.findall(r"(?s)```python\n(import json.*?)```", PAGE.read_text())
NAMESPACE = {}
exec(READER, NAMESPACE)
apply_delta = NAMESPACE["apply_delta"]


def delta_settings(folder, **keys):
    keys = {"to": f"{folder}/deltas", "every_s": 0.001} | keys
    return [f"export.deltas.{key}={value}" for key, value in keys.items()]


def create_stream(folder):
    """Create the stream of a run in `folder`, as the driver does."""
    from small import make_small_config

    from raytrec.config.run_config import load_config
    from raytrec.deltas.chain import open_stream

    settings = [f"run.dir={folder}/run", "run.name=run", *delta_settings(folder)]
    open_stream(load_config(make_small_config(1, {}), settings))


def shift_ids(rank, batches, distance=2):
    """Shift the ids of managed tables at each step, so that new ids appear and old ones are evicted."""
    for step, batch in enumerate(batches):
        parts = batch.sparse.values().split(batch.sparse.length_per_key())
        for ids, key in zip(parts, batch.sparse.keys(), strict=True):
            ids += distance * step if key != "city" else 0


def shift_ids_further(rank, batches):
    """Shift the ids after a resume by other distances, so that rows get other ids than before."""
    shift_ids(rank, batches, 5)


def look_up_first_rows(rank, batches):
    """Look up row 0 only after a resume, so that the other rows of earlier deltas are not looked up again."""
    for batch in batches:
        batch.sparse.values().zero_()


def read_state(made):
    """Return (tables, ids, dense) of the current state as arrays; a collective."""
    import torch.distributed as dist

    from raytrec.embeddings.hashing import unhash_bits

    tables = {n: t.weight.dense().float().numpy().copy() for n, t in made.checkpoints._state.tables.items()}
    ids = {}
    for name, part in made.step.maps.items():
        entries = part.state().rows
        pairs = dict(zip(entries.fields["row"].tolist(), unhash_bits(entries.keys).tolist(), strict=True))
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, pairs)
        ids[name] = {row: id for each in parts for row, id in each.items()}
    with made.step._averaged():
        dense = {f"model.{n}": v.detach().numpy().copy() for n, v in made.step.head.model.state_dict().items()}
    return tables, ids, dense


def train(rank, world, folder, plan, schema, settings, stop=None, resume=False, disturb=None):
    """Train, and return the states by step and the warnings."""
    steps, every = (MANAGED_STEPS, MANAGED_EVERY) if schema.managed else (STEPS, EVERY)
    changes = ["run.name=run", f"checkpoint.every_steps={every}", *delta_settings(folder), *settings]
    spoil = shift_ids_further if resume else shift_ids
    if not schema.managed:
        spoil = look_up_first_rows if resume else None
    made = loop.make_worker_loop(
        *(rank, world, steps, changes, f"{folder}/run", spoil),
        plan=plan,
        schema=schema,
        kernel=None if plan == "data_parallel" else "fused",
        resume=resume,
    )
    states = {made.progress.step: read_state(made)}

    def after(made):
        made.checkpoints._deltas.wait_until_written()  # so that the next delta is not skipped
        if disturb:
            disturb(made)
        if not made.step.is_map_ahead:
            states[made.progress.step] = read_state(made)
        return loop.STOP if made.progress.step == stop else None

    made.train(steps - made.progress.step, after)
    assert made.error is None, made.error
    warnings = [message["text"] for message in made.said if message["kind"] == "warn"]
    return states, warnings


def apply_with_raytrec(folder, number, schema, state):
    """Return (tables, ids, dense) of the state to which a delta leads, with the reader of raytrec."""
    weights = {name: torch.from_numpy(value) for name, value in state[2].items()}
    delta = read_delta(folder, Position("run", *read_delta_manifest(folder, number)), schema, weights)
    tables, ids = ({name: each.copy() for name, each in part.items()} for part in state[:2])
    for name, changes in delta.rows.items():
        tables[name][changes.rows.numpy()] = changes.values.numpy()
    for name, changes in delta.ids.items():
        ids[name] |= dict.fromkeys(changes.listed.tolist())
        ids[name] |= zip(changes.rows.tolist(), changes.ids.tolist(), strict=True)
    return tables, ids, {name: value.numpy() for name, value in delta.dense.items()}


def check_states(folder, states, first, state, schema):
    """Apply all deltas from number `first` on, compare each state, and return the steps and the last state."""
    tables, ids, dense = state
    steps, number = [], first
    while Path(f"{folder}/deltas/deltas/{number:012d}.json").exists():
        ours = apply_with_raytrec(f"{folder}/deltas", number, schema, (tables, ids, states[max(states)][2]))
        manifest = apply_delta(f"{folder}/deltas", number, tables, ids, dense)
        np.testing.assert_equal(ours, (tables, ids, dense))
        their_tables, their_ids, their_dense = states[manifest["step"]]
        for name, values in their_tables.items():
            np.testing.assert_array_equal(tables[name], values, f"table {name} after delta {number}")
        for name, rows in their_ids.items():
            assert {row: id for row, id in ids[name].items() if id is not None} == rows, (name, number)
        assert dense.keys() == their_dense.keys()
        assert all(np.array_equal(dense[name], value) for name, value in their_dense.items())
        steps.append((manifest["step"], manifest["last"]))
        number += 1
    return steps, (tables, ids, dense)


def begin_state(states):
    tables, ids, _ = states[0]
    return {n: v.copy() for n, v in tables.items()}, {n: dict(v) for n, v in ids.items()}, {}


PLANS = ["row_wise", "table_wise", "column_wise", "grid_shard", "data_parallel"]


# Ids expire, and their rows are not reassigned in the run.
EXPIRING = managed_schema({**TABLES, "user": {"rows": 400, "dim": 8, "ids": {"ttl_steps": 2}}})
CASES = {
    **{plan: (2, plan, SCHEMA, []) for plan in PLANS},
    "one rank": (1, "row_wise", SCHEMA, []),
    "averages": (1, "table_wise", SCHEMA, ["train.ema=0.9"]),
    "managed ids": (3, "row_wise", managed_schema(), []),
    "managed ids, column-wise": (2, "column_wise", managed_schema(), []),
    "expiring ids": (2, "row_wise", EXPIRING, []),
}


# Other cases cover the parts of these cases.
SLOW_CASES = ["table_wise", "grid_shard", "one rank", "managed ids", "managed ids, column-wise"]


def mark_slow(names, slow_names):
    return [pytest.param(name, marks=[pytest.mark.survive] if name in slow_names else []) for name in names]


@pytest.mark.parametrize("name", mark_slow(CASES, SLOW_CASES))
def test_each_delta_leads_to_the_state_of_its_step(tmp_path, name):
    world, plan, schema, settings = CASES[name]
    create_stream(tmp_path)
    states, warnings = run_on_ranks(world, train, str(tmp_path), plan, schema, settings)[0]
    assert not warnings
    steps, (_, ids, _) = check_states(tmp_path, states, 1, begin_state(states), schema)
    saved, end = ({8, 16}, MANAGED_STEPS) if schema.managed else ({4, 8}, STEPS)
    assert saved < {step for step, _ in steps} and len(steps) > 4
    assert steps[-1] == (end, True) and not any(last for _, last in steps[:-1])
    assert not schema.managed or any(None in rows.values() for rows in ids.values()), "no row has lost its id"


# Most rows are not looked up again before the first delta of the new group.
LARGE = make_small_schema(tables={"user": {"rows": 600, "dim": 8}, "tag": {"rows": 300, "dim": 8}})
RESUMES = {
    "row-wise to column-wise": (LARGE, (2, "row_wise"), (3, "column_wise")),
    "data-parallel to table-wise": (SCHEMA, (3, "data_parallel"), (1, "table_wise")),
    "managed ids": (managed_schema(), (1, "table_wise"), (2, "row_wise")),
    "expiring ids": (EXPIRING, (2, "row_wise"), (1, "table_wise")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_slow(RESUMES, ["data-parallel to table-wise", "managed ids"]))
@pytest.mark.parametrize(
    "fault", [None, *(pytest.param(fault, marks=pytest.mark.survive) for fault in ("delta lost", "file damaged"))]
)
def test_deltas_after_a_resume_lead_to_the_states_of_the_run(tmp_path, name, fault):
    """Deltas exist beyond the checkpoint to which the run returns, with another plan and number of ranks.

    If the delta of the checkpoint was not written, or a later delta is damaged, the changes are not known.
    """
    schema, (world, plan), (new_world, new_plan) = RESUMES[name]
    create_stream(tmp_path)
    saved, stop, end = (8, 14, MANAGED_STEPS) if schema.managed else (4, 7, STEPS)
    states, _ = run_on_ranks(world, train, str(tmp_path), plan, schema, [], stop)[0]
    if fault == "delta lost":
        about = read_about(tmp_path / f"run/checkpoints/step-{saved:010d}")
        for path in sorted((tmp_path / "deltas/deltas").glob("*.json"))[about["deltas"]["number"] - 1 :]:
            path.unlink()
    steps, state = check_states(tmp_path, states, 1, begin_state(states), schema)
    assert (steps[-1][0] < saved) if fault == "delta lost" else (steps[-1][0] > saved)
    if fault == "file damaged":
        flip_lowest_bit(max((tmp_path / "deltas/deltas").glob("*/rows-00000.arrow")), 1000)
    states, warnings = run_on_ranks(new_world, train, str(tmp_path), new_plan, schema, [], None, True)[0]
    assert min(states) == saved and not warnings
    steps, _ = check_states(tmp_path, states, len(steps) + 1, state, schema)
    assert steps[-1] == (end, True) and len(steps) > 2


def test_folder_with_exports_of_an_unknown_run_is_refused(tmp_path):
    (tmp_path / "deltas/exports/000000000500").mkdir(parents=True)
    with pytest.raises(ConfigError, match="the deltas of an unknown run"):
        create_stream(tmp_path)


def fill_disk_for_a_while(made):
    """Fill the disk of the deltas after step 3, and free it after step 7, on rank 0."""
    place = Path(made.context.task.config.export.deltas.to)
    if made.context.index == 0 and made.progress.step == 3:
        fill_disk(place)
    if made.context.index == 0 and made.progress.step == 7:
        (place / "ballast").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema", [SCHEMA, pytest.param(managed_schema(), marks=pytest.mark.survive)], ids=["plain ids", "managed ids"]
)
def test_delta_after_a_full_disk_contains_all_changes(tmp_path, schema):
    with small_disk(tmp_path / "deltas", "1m"):
        create_stream(tmp_path)
        arguments = str(tmp_path), "row_wise", schema, [], None, False, fill_disk_for_a_while
        states, warnings = run_on_ranks(2, train, *arguments)[0]
        steps, _ = check_states(tmp_path, states, 1, begin_state(states), schema)
        folders = [path for path in (tmp_path / "deltas/deltas").iterdir() if path.is_dir()]
    assert len(warnings) == 1 and "No space left" in warnings[0], "one warning for several failures"
    assert steps[-1][1] and len(steps) > 2
    assert len(folders) == len(steps), "files of failed deltas remain"


def test_rows_with_nan_are_not_written(tmp_path):
    from raytrec.deltas.changes import RowPiece
    from raytrec.deltas.files import DeltaFiles

    files = DeltaFiles(str(tmp_path), "000000000001-a", ["user"])
    values = torch.tensor([[1.0, 2.0], [3e38, 3e38], [torch.nan, 0.0]])
    files.write_rows("finite.arrow", [RowPiece("user", torch.arange(2), 0, values[:2])])
    assert list(files.entries["rows"]) == ["000000000001-a/finite.arrow"]
    with pytest.raises(ValueError, match="table user contain NaN"):
        files.write_rows("rows.arrow", [RowPiece("user", torch.arange(3), 0, values)])
    assert [path.name for path in tmp_path.rglob("*.arrow")] == ["finite.arrow"]


def test_folder_that_cannot_be_opened_does_not_end_training():
    from raytrec.deltas.files import DeltaFiles, ManifestWriter
    from raytrec.deltas.format import DeltaManifest, UnusableDeltaError, read_batches
    from raytrec.deltas.publish import DeltaPublisher

    folder = "deltas\0"  # raises the same DataError as a store that cannot be reached
    assert not DeltaPublisher.lacks_export(SimpleNamespace(_folder=folder))
    assert ManifestWriter(folder, "stream", {}, lambda: None).find_since(None, 0) == (0, None)
    files = DeltaFiles(folder, "000000000001-a", ["user"])  # on a rank, errors in write_… end only this delta
    with pytest.raises(DataError, match="cannot open the path"):
        files.write_dense("dense.arrow", {})
    files = {"rows": {"000000000001-a/rows.arrow": {"bytes": 1, "sha256": ""}}}
    manifest = DeltaManifest(stream="", number=1, parent="", step=1, cut_unix_s=0.0, tables={}, files=files)
    with pytest.raises(UnusableDeltaError, match="cannot open the path"):
        next(read_batches(folder, manifest, "rows"))


def test_reason_names_the_newest_delta_if_deltas_were_removed(tmp_path):
    from raytrec.deltas.files import ManifestWriter

    _, reason, _ = ManifestWriter(str(tmp_path), "stream", {}, lambda: None).begin(3)
    assert reason == f"the newest delta in {tmp_path} is 0, not 3"


@pytest.mark.parametrize("last", [False, True])
def test_failure_of_the_last_delta_is_shown_even_after_another_failure(last):
    from raytrec.deltas.files import DeltaOutcome
    from raytrec.deltas.publish import DeltaPublisher

    running, warnings = Future(), []
    running.set_result(DeltaOutcome(4, "No space left on device"))
    cut = SimpleNamespace(rows=[], ids={}, last=last)
    publisher = SimpleNamespace(_running=running, _number=4, _cut=cut, _has_failed=last, _warn=warnings.append)
    publisher._ids = SimpleNamespace(put_back=lambda ids: None)
    DeltaPublisher.collect(publisher)
    (warning,) = warnings
    assert warning.startswith("delta 5 was not written: No space left on device; if training continues, ")

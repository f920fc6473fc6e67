"""Rows carry ids: whatever happens to the run, each is trained once an epoch, in the same global batch."""

import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrec.config.schema import Schema
from raytrec.data import decode as decode_module
from raytrec.data import order as order_module
from raytrec.data.fragments import scan
from raytrec.data.order import Order
from raytrec.data.read_plan import ReadPlan
from raytrec.data.rows import read_item
from raytrec.data.stream import Stream

SCHEMA = Schema.parse(
    {
        "labels": ["label"],
        "sparse": {"id": {"table": "id"}, "bag": {"table": "id"}},
        "tables": {"id": {"rows": 100_000, "dim": 4}},
    },
    "test",
)


def write(folder, layout, page_rows=None):
    """Files of row groups of these sizes; ids count through. A file without groups, and empty groups, too."""
    first = 0
    for number, sizes in enumerate(layout):
        ids = np.arange(first, first + sum(sizes))
        first += len(ids)
        table = pa.table(
            {"label": ids % 2, "id": ids, "bag": pa.array([[i] * (i % 3) for i in ids], pa.list_(pa.int64()))}
        )
        pages = {"max_rows_per_page": page_rows}
        with pq.ParquetWriter(folder / f"{number:03d}.parquet", table.schema, **pages) as writer:
            for size in sizes:
                writer.write_table(table.slice(0, size), row_group_size=max(1, size))
                table = table.slice(size)
    return first


def ids_of(batch):
    """The ids of a batch's rows; their other values must be theirs."""
    rows = int(batch.weights.sum())
    ids = batch.sparse["id"].values().tolist()
    assert batch.sparse["id"].lengths().tolist() == [1] * rows + [0] * (len(batch.weights) - rows)
    assert batch.sparse["bag"].values().tolist() == [i for i in ids for _ in range(i % 3)]
    assert batch.labels[:rows, 0].tolist() == [i % 2 for i in ids]
    return ids


class Direct(Stream):
    """A stream whose read tasks run in this process, their output cut into blocks at random, as Ray might."""

    def _tables(self, items):
        rng = random.Random(len(items))
        rest = None
        for item in items:
            table = read_item(item, self.dataset.form)
            rest = table if rest is None else pa.concat_tables([rest, table])
            while rest.num_rows and rng.random() < 0.7:
                cut = rng.randint(1, rest.num_rows)
                yield rest.slice(0, cut).combine_chunks()  # as blocks are after their journey
                rest = rest.slice(cut)
        if rest is not None and rest.num_rows:
            yield rest


def trained(data, order, epoch, world, start, stop):
    """The global batches, as sorted ids, that `world` ranks train at the steps from start to stop."""
    out = [[] for _ in range(start, stop)]
    for rank in range(world):
        batches = Direct(data, order, rank=rank, world=world).batches(epoch, start)
        for ids in out:
            ids += ids_of(next(batches))
        batches.close()
    return [sorted(ids) for ids in out]


@settings(max_examples=60, deadline=None)
@given(
    layout=st.lists(
        st.lists(st.one_of(st.just(0), st.just(1), st.integers(2, 120)), max_size=4), min_size=1, max_size=4
    ).filter(lambda layout: sum(map(sum, layout)) > 0),
    batch=st.integers(4, 50),
    lanes=st.integers(4, 9),
    shuffle=st.sampled_from(["none", "groups", "window"]),
    window=st.integers(1, 3),
    phases=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), min_size=1, max_size=8),
    page_rows=st.sampled_from([3, 10, 20_000]),
)
def test_any_layout_any_stops(tmp_path_factory, layout, batch, lanes, shuffle, window, phases, page_rows):
    """Phases of (world size, steps until the run is stopped) over two epochs, the last phase to the end.

    Pages of 3 or 10 rows are to row groups of up to 120 what 20,000 are to those of up to 800,000: such are
    cut into pieces, and those read by their pages.
    """
    folder = tmp_path_factory.mktemp("layout")
    rows = write(folder, layout, page_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "PAGE_ROWS", page_rows)
        patch.setattr(decode_module, "WHOLE_ROWS", 2 * page_rows)
        check_exactly_once(folder, rows, Order(batch, lanes, shuffle, window, seed=5), phases)


def check_exactly_once(folder, rows, order, phases):
    data, steps = scan(str(folder), ReadPlan(SCHEMA)), order.steps(rows)
    undisturbed = [ids for epoch in (0, 1) for ids in trained(data, order, epoch, 1, 0, steps)]
    assert Counter(i for ids in undisturbed for i in ids) == Counter(dict.fromkeys(range(rows), 2))
    got, epoch, step = [], 0, 0
    while epoch < 2:
        world, count = phases.pop(0) if phases else (2, steps)
        stop = min(steps, step + count)
        got += trained(data, order, epoch, world, step, stop)
        epoch, step = (epoch + 1, 0) if stop == steps else (epoch, stop)
    assert got == undisturbed


def rank_process(folder, log, order, rank, world, epoch, step):
    """One rank of a run, in a separate process: what it trains goes to its log, a line for each step."""
    import ray

    here = str(Path(__file__).parent)

    @ray.remote(num_cpus=0)
    class Rank:
        def train(self):
            sys.path.insert(0, here)
            from test_exactly_once import SCHEMA, ids_of

            stream = Stream(scan(str(folder), ReadPlan(SCHEMA)), order, rank=rank, world=world)
            with open(log, "a") as file:
                file.write(f"pid {os.getpid()}\n")
                file.flush()
                for e in range(epoch, 3):
                    first = step if e == epoch else 0
                    for k, batch in enumerate(stream.batches(e, first), first):
                        time.sleep(0.05)
                        file.write(f"{e} {k} {' '.join(map(str, ids_of(batch)))}\n")
                        file.flush()

    actor = Rank.remote()
    return actor, actor.train.remote()


def read_log(log):
    """(pid or None, {(epoch, step): ids}) of the lines that were written whole."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    pid = int(lines[0].split()[1]) if lines else None
    return pid, {(int(e), int(k)): [int(i) for i in ids] for e, k, *ids in map(str.split, lines[1:])}


@pytest.mark.usefixtures("ray_cluster")
def test_killed_again_and_again(tmp_path):
    """Real processes and Ray Data: SIGKILL at random moments, world sizes 1 → 3 → 2 → …, three epochs."""
    import ray

    data, log_of = tmp_path / "d", lambda phase, rank: tmp_path / f"{phase}-{rank}.log"
    data.mkdir()
    rows = write(data, [[90, 1, 200], [], [0, 70], [333, 5]])
    order = Order(32, 6, "window", 2, seed=9)
    steps, rng = order.steps(rows), random.Random(9)
    committed, position, kills = [], (0, 0), 0
    for phase in range(40):
        world = (1, 3, 2)[phase % 3]
        ranks = [rank_process(data, log_of(phase, r), order, r, world, *position) for r in range(world)]
        tasks = [task for _, task in ranks]
        stop_at = rng.randint(1, 25) if phase < 4 else 10**9
        wait_until(lambda: ready(tasks, log_of, phase, world, stop_at))  # noqa: B023
        pids = [read_log(log_of(phase, r))[0] for r in range(world)]
        if len(ray.wait(tasks, num_returns=world, timeout=0)[0]) < world:
            kills += 1
            for pid in pids:
                kill(pid)
        logs = [read_log(log_of(phase, r))[1] for r in range(world)]
        while position[0] < 3 and all(position in log for log in logs):  # all ranks have trained this step
            committed.append(sorted(i for log in logs for i in log[position]))
            epoch, step = position
            position = (epoch, step + 1) if step + 1 < steps else (epoch + 1, 0)
        if position[0] == 3:
            break
    assert kills >= 3, f"only {kills} kills"
    whole = scan(str(data), ReadPlan(SCHEMA))
    assert committed == [ids for epoch in range(3) for ids in trained(whole, order, epoch, 1, 0, steps)]
    assert Counter(i for ids in committed for i in ids) == Counter(dict.fromkeys(range(rows), 3))


def ready(tasks, log_of, phase, world, stop_at):
    """Whether every rank has trained `stop_at` steps, or all have ended."""
    import ray

    if len(ray.wait(tasks, num_returns=world, timeout=0)[0]) == world:
        ray.get(tasks)
        return True
    return all(len(read_log(log_of(phase, rank))[1]) >= stop_at for rank in range(world))


def wait_until(condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "nothing goes on"
        time.sleep(0.01)


def kill(pid):
    with suppress(ProcessLookupError, FileNotFoundError):  # it has gone
        os.kill(pid, signal.SIGKILL)
        while " Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.01)

"""Records of very many ranks: entries of a table that ranks add up, and series that MLflow gets, counted."""

import json
import random

import pytest
import small
from ranks import on_ranks

from raytrec.common.messages import PHASES, RankLine, from_json
from raytrec.report.diagnostics import hot_rank
from raytrec.tracking.aggregate import (
    FIGURES,
    NORMS,
    SUMMED,
    WEIGHTS,
    load_order,
    over_time,
    table_over_ranks,
)
from raytrec.tracking.reduced import pack, unpack
from raytrec.tracking.translate import MOST_RANKS, MOST_TABLES, rank_metrics


def entry(draw, replicated=False):
    """What a rank says of its shard, now and then without a figure."""
    found = {key: float(draw.randint(0, 10**6)) for key in SUMMED}
    found |= {key: draw.random() for key in (*NORMS, *WEIGHTS, "max_abs", "row_norm_max")}
    found = {key: None if draw.random() < 0.1 else value for key, value in found.items()}
    found |= {"rows": draw.randint(0, 99), "columns": 8, "read_ids": draw.randint(0, 9)}
    counts = [draw.randint(0, 9) for _ in range(30)] if draw.random() < 0.9 else None
    return found | {"replicated": replicated, "row_norm_counts": counts}


def line(rank, world, tables, **others):
    phases = dict.fromkeys(PHASES, 0.5)
    made = RankLine(
        step=100,
        first_step=0,
        unix_s=1e9,
        rank=rank,
        world=world,
        attempt=1,
        steps=100,
        seconds=5.0,
        phases_s=phases,
        system={"cpu_percent": 50.0 + rank},
        tables=tables,
        **others,
    )
    assert from_json(json.loads(json.dumps(made.to_json()))) == made
    return made.line()


def reduced(entries):
    sums, maxima = zip(*map(pack, entries), strict=True)
    return unpack([sum(c) for c in zip(*sums, strict=True)], [max(c) for c in zip(*maxima, strict=True)])


@pytest.mark.parametrize("replicated", [False, True])
def test_one_entry_of_all_shards_says_what_they_say(replicated):
    draw = random.Random(7)
    for ranks in (1, 2, 9, 9, 9):
        entries = [entry(draw, replicated) for _ in range(ranks)]
        each = [line(rank, ranks, {"t": e}) for rank, e in enumerate(entries)]
        spread = {"t": reduced([*entries, {}])}
        loads = [{"lookup_bytes": e["lookup_bytes"] or 0.0, "tables": 1} for e in entries]
        few = [line(r, ranks, {}, sums=loads[r], **({} if r else {"spread": spread})) for r in range(ranks)]
        expected, found = table_over_ranks(each, "t"), table_over_ranks(few, "t")
        assert found == pytest.approx(expected, nan_ok=True, rel=1e-9)
        assert load_order(few) == load_order(each) == ["t"]
        assert hot_rank(few) == hot_rank(each)
        twice = over_time([*few, *few])
        assert twice[-1]["sums"]["lookup_bytes"] == 2 * loads[-1]["lookup_bytes"]
        assert table_over_ranks(twice, "t")["lookups"] == pytest.approx(2 * expected["lookups"], nan_ok=True)


def test_few_ranks_are_written_as_ever():
    assert not {"sums", "spread"} & line(0, 1, {}).keys()


def test_series_do_not_grow_with_ranks_and_tables():
    draw = random.Random(1)
    names = {}
    for world, tables in ((MOST_RANKS, MOST_TABLES), (1024, 1000)):
        lines = [
            line(r, world, {f"t{i}": entry(draw) for i in range(r, tables, world)}) for r in range(world)
        ]
        names[world] = rank_metrics(lines, 64)
    few, many = names.values()
    assert {f"watch/rank/{r}/data_ms" for r in range(MOST_RANKS)} < few.keys()
    assert len(many) <= MOST_TABLES * len(FIGURES) + 3 * 20 < len(few) and len(many) < 5_000
    assert (many["watch/ranks/data_ms/median"], many["watch/ranks/step_ms/max"]) == (5.0, 50.0)
    assert many["system/ranks/cpu_utilization_percentage/max"] == 50.0 + 1023
    held = {int(name.split("/")[2][1:]) for name in many if name.startswith("watch/table/")}
    assert len(held) == MOST_TABLES, "those that hold most bytes"


def spread(rank, world):
    from raytrec.checkpoint.state import LogicalState
    from raytrec.worker import spread_tables

    step = small.build(small.config(world, {"sharding_type": "row_wise"}))
    tables = LogicalState(step.model, step.optimizer).tables.values()
    assert spread_tables.SpreadTables(tables).names == []
    draw = random.Random(rank)
    mine = {table.name: entry(draw) for table in tables}
    before, spread_tables.MOST_HOLDERS = spread_tables.MOST_HOLDERS, 1
    try:
        return mine, spread_tables.SpreadTables(tables).reduce(mine)
    finally:
        spread_tables.MOST_HOLDERS = before


def test_ranks_add_their_parts_up():
    answers = on_ranks(2, spread)
    each = [mine for mine, _ in answers]
    (first, other) = (said for _, said in answers)
    assert first["tables"] == other["tables"] == {} and "spread" not in other
    for name in ("user", "tag"):
        assert first["spread"][name] == pytest.approx(reduced([e[name] for e in each]))
    for said, mine in zip((first, other), each, strict=True):
        assert said["sums"]["tables"] == 2
        assert said["sums"]["lookups"] == sum(e["lookups"] or 0.0 for e in mine.values())

"""Full-ranking metrics on 1, 2 and 3 ranks, compared with a NumPy reference."""

from math import log2
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
import torch
from evaluations import PARTS
from ranks import run_on_ranks
from small import SCHEMA
from standin import use_stand_in_gpu

from raytrec.config.data import EvalSection, TaskSection
from raytrec.metrics.selection import Selection
from raytrec.tasks.outputs import StepOutputs
from raytrec.tasks.task import resolve_tasks

ITEMS, ROWS, WIDTH, AT = 47, 60, 4, (1, 5)


def rows(texts=False, seed=0, several=False):
    """Return vectors with ties and a NaN; seen, repeated and unknown items; and rows of weight 0.

    Args:
        several: each row has a list of relevant items: none, one item twice, or many.
    """
    draw = np.random.default_rng(seed)
    keys = draw.permutation(ITEMS) * 10**12
    items = draw.integers(-1, 2, (ITEMS, WIDTH)).astype(np.float32)
    items[3] = np.nan
    of_row = np.append(draw.choice(keys, ROWS - 2), [5, keys[3]])
    seen = [list(draw.choice(keys, draw.integers(0, 9))) + [7] * (i % 2) for i in range(ROWS)]
    seen[1], seen[2] = None, [of_row[2], of_row[2]]
    other = [list(draw.choice(keys, i % 3)) for i in range(ROWS)]
    name = (lambda key: None if key is None else f"item {key}") if texts else (lambda key: key)
    item = [name(key) for key in of_row.tolist()]
    if several:
        lists = [draw.choice(keys, i % 8).tolist() + [5] * (i % 5 == 4) for i in range(ROWS)]
        lists[11], lists[12], lists[13] = [int(keys[0])] * 2, None, keys[:30].tolist()
        item = [each and [name(key) for key in each] for each in lists]
    return {
        "keys": [name(key) for key in keys.tolist()],
        "vectors": items,
        "queries": draw.integers(-1, 2, (ROWS, WIDTH)).astype(np.float32),
        "item": item,
        "seen": [each and [name(int(key)) for key in each] for each in seen],
        "other": [[name(int(key)) for key in each] for each in other],
        "labels": (draw.random(ROWS) < 0.8).astype(np.float32),
        "weights": (draw.random(ROWS) < 0.9).astype(np.float32),
    }


def compute_reference(given, places):
    """Return the metrics, computed row by row from the sorted items and the relevant items."""
    place, figures, unknown = {key: i for i, key in enumerate(given["keys"])}, [], [0, 0]
    for i in range(ROWS):
        right = given["item"][i]
        right = set(right or []) if right is None or isinstance(right, list) else {right}
        if not given["labels"][i] or not given["weights"][i] or not right:
            continue
        own = {place[key] for key in right if key in place}
        seen = [*(given["seen"][i] or []), *given["other"][i]]
        unknown[0] += len(right) - len(own)
        unknown[1] += sum(key not in place for key in seen)
        left_out = {place.get(key) for key in seen} - own
        scores = (given["vectors"].astype(np.float64) @ given["queries"][i]).astype(np.float32)
        # At equal scores, irrelevant items come first. NaN sorts first if irrelevant, and last if relevant.
        value = [(np.inf if j in own else -np.inf) if np.isnan(x) else -x for j, x in enumerate(scores)]
        order = sorted((j for j in range(ITEMS) if j not in left_out), key=lambda j: (value[j], j in own))
        figures.append(compute_order_metrics([j in own for j in order], len(right), places))
    names = compute_order_metrics([True], 1, places)
    found = {name: np.mean([each[name] for each in figures]) if figures else None for name in names}
    found |= {"rows": len(figures), "items": ITEMS}
    found |= {"unknown_items": unknown[0], "unknown_seen": unknown[1]}
    return {f"retrieval.{name}": value for name, value in found.items()}


def compute_order_metrics(hits, right, places):
    """Return the metrics of one row from the positions of its relevant items."""
    precision = [sum(hits[: i + 1]) / (i + 1) if hit else 0 for i, hit in enumerate(hits)]
    gains = [hit / log2(2 + i) for i, hit in enumerate(hits)]
    best = [1 / log2(2 + i) for i in range(right)]
    return (
        {f"hit_rate@{k}": any(hits[:k]) for k in places}
        | {f"map@{k}": sum(precision[:k]) / min(k, right) for k in places}
        | {f"ndcg@{k}": sum(gains[:k]) / sum(best[:k]) for k in places}
        | {f"recall@{k}": sum(hits[:k]) / right for k in places}
        | {"mrr": 1 / (1 + hits.index(True)) if any(hits) else 0}
    )


def test_reference_ranking_metrics_match_scikit_learn():
    from sklearn.metrics import average_precision_score, ndcg_score

    draw = np.random.default_rng(0)
    for _ in range(50):
        hits = draw.random(20) < 0.3
        hits[draw.integers(20)] = True
        scores = -np.arange(20.0)
        found = compute_order_metrics(hits.tolist(), int(hits.sum()), (3, 20))
        assert found["ndcg@3"] == pytest.approx(ndcg_score([hits], [scores], k=3))
        assert found["map@20"] == pytest.approx(average_precision_score(hits, scores))


class Step:
    """Stand-in for a worker's step that returns fixed vectors."""

    def __init__(self, device):
        self._device = device

    def evaluate(self, batches, tower=None):
        for batch in list(batches):  # the pipeline reads ahead of its outputs
            nothing = torch.zeros((), device=self._device)
            yield StepOutputs({}, batch.weights.to(self._device), nothing, vectors=batch.vectors.to(self._device))


def batches(columns, vectors, rank, world, **more):
    """Yield this rank's rows in 3 batches, each with padding rows."""
    ends = [0, *(round(len(vectors) * share) for share in PARTS[world])]
    for mine in np.array_split(np.arange(ends[rank], ends[rank + 1]), 3):
        padded = np.append(mine, [0, 0])
        yield SimpleNamespace(
            reserved=pa.table(columns).take(mine),
            vectors=torch.from_numpy(vectors[padded]),
            weights=(torch.arange(len(padded)) < len(mine)).float(),
            **{name: torch.from_numpy(values[padded]).unsqueeze(1) for name, values in more.items()},
        )


def rank_items(rank, world, given, cells):
    import torch.distributed as dist

    from raytrec.metrics.full_ranking import FullRanking

    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    settings = EvalSection(retrieval={"items": "items", "seen": ["seen", "other"], "at": AT})
    selection = Selection(resolve_tasks([TaskSection(label="y", metrics=[])], SCHEMA), settings)
    assert [f.key for f in selection.figures] == list(compute_reference(given, AT))[:-4]
    ranking, step = FullRanking(selection, device, cells), Step(device)
    all_items = SimpleNamespace(
        batches=lambda: batches({"item": given["keys"]}, given["vectors"], rank, world),
        dataset=SimpleNamespace(rows=ITEMS),
    )
    ranking.compute_item_vectors(step, all_items)
    kind = pa.list_(pa.array(given["keys"]).type)
    lists = any(isinstance(each, list) for each in given["item"])
    columns = {"item": pa.array(given["item"], kind if lists else None)}
    columns |= {n: pa.array(given[n], kind) for n in ("seen", "other")}
    own = batches(columns, given["queries"], rank, world, labels=given["labels"], task_weights=given["weights"])
    for outputs in step.evaluate(ranking.store_queries(own)):
        ranking.add(outputs.vectors)
    return ranking.figures()


@pytest.mark.parametrize("several", [False, True], ids=["one right item", "several"])
@pytest.mark.parametrize("world, cells, texts", [(1, 1 << 22, True), (2, 1, False), (3, 100, True)])
def test_full_ranking_metrics_match_the_reference(world, cells, texts, several):
    given = rows(texts, several=several)
    expected = compute_reference(given, AT)
    for found in run_on_ranks(world, rank_items, given, cells):
        assert found == pytest.approx(expected, abs=1e-12)
    assert expected["retrieval.unknown_seen"] > 10 < 20 * expected["retrieval.unknown_items"]
    assert 0.05 < expected["retrieval.hit_rate@5"] < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True], ids=["one right item", "several"])
def test_full_ranking_on_gpu_matches_the_reference(several):
    given = rows(several=several)
    for found in run_on_ranks(2, rank_items, given, 100, device="cuda"):
        assert found == pytest.approx(compute_reference(given, AT), abs=1e-12)


def count_host_waits(rank, world, given, cells):
    """Return the number of host waits for the GPU per ranked batch."""
    from standin import StandInGpu

    StandInGpu.active.waits.clear()
    rank_items(rank, world, given, cells)
    adds = [w for w in StandInGpu.active.waits if any(place.endswith("full_ranking.py:add") for place in w.callers)]
    return len(adds) / 3


@pytest.mark.slow
def test_full_ranking_needs_few_host_waits():
    """Two ranks; each block of items that float32 cannot decide adds at most one wait."""
    whole, blocks = (run_on_ranks(2, count_host_waits, rows(), cells, device="cuda") for cells in (1 << 22, 100))
    assert max(whole) <= 8 and max(blocks) <= max(whole) + 5


def test_full_ranking_without_positive_rows_has_no_metric():
    given = rows() | {"labels": np.zeros(ROWS, np.float32)}
    for found in run_on_ranks(2, rank_items, given, 100):
        assert found["retrieval.mrr"] is None and found["retrieval.rows"] == 0


def make_close_vectors(count, width, seed):
    """Return queries and items; some items differ only in the last bits of their dot product."""
    draw = torch.Generator().manual_seed(seed)
    queries = torch.randn(4, width, generator=draw)
    items = torch.randn(count, width, generator=draw)
    items[: count // 8] = items[0] * (1 + 2e-7 * torch.randn(count // 8, 1, generator=draw))
    return queries, items


@pytest.mark.parametrize("case", ["spread", "close", "ties", "zeros", "large", "small", "not finite"])
def test_float32_comparison_matches_float64(case):
    from raytrec.metrics.full_ranking import compare_exact, compare_fast

    for seed in range(20):
        queries, items = make_close_vectors(400, 33, seed)
        if case == "ties":
            queries, items = queries.round(), items.round()
        if case == "zeros":
            queries[:2] = 0
        queries, items = (x * {"large": 1e18, "small": 1e-22}.get(case, 1.0) for x in (queries, items))
        if case == "not finite":
            items[3], items[4, 0], items[5], queries[1, 2] = np.nan, np.inf, 3e38, np.nan
        scores = torch.stack([compute_exact_score(queries[i], items[7 * i]) for i in range(4)])
        scores = torch.stack([scores, scores.flip(0)], 1)
        expected = [*compare_exact(queries, items, scores, [4, 2])]
        found = [*compare_fast(queries, items, scores, [4, 2])]
        assert all(map(torch.equal, found, expected)) and len(found[1]) == 2, seed
    if case == "close":  # float32 alone gives another result
        assert not torch.equal(~(queries @ items.T < scores[:, :1]), expected[0])


def compute_exact_score(query, item):
    return (query.double() * item.double()).sum().float()


def test_block_size_follows_free_gpu_memory():
    from raytrec.metrics.full_ranking import DEFAULT_BLOCK_CELLS, MAX_BLOCK_CELLS, choose_block_cells

    assert choose_block_cells(torch.device("cpu")) == DEFAULT_BLOCK_CELLS
    with use_stand_in_gpu():
        assert choose_block_cells(torch.device("cuda")) == MAX_BLOCK_CELLS
        for free, cells in ((1 << 33, 1 << 26), (1 << 20, DEFAULT_BLOCK_CELLS)):
            with patch.object(torch.cuda, "mem_get_info", lambda device, free=free: (free, 1 << 36)):
                assert choose_block_cells(torch.device("cuda")) == cells

"""Components of the live checks: hashes, shard maps, metrics, and handling of outcomes."""

import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loops import SHARDING_PLANS, failed_outcomes, run_with_fault
from rank_threads import run_in_threads
from ranks import run_on_ranks
from small import make_small_config
from standin import use_stand_in_gpu
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.checks.live.agreement import CHUNK, Replicas, _make_multipliers, fingerprint
from raytrec.checks.live.keys import LONGEST_BAG, select_bags
from raytrec.checks.live.numerics import (
    MAX_GROWTH,
    SAMPLED_ROWS_PER_SHARD,
    Finite,
    Numerics,
    Sizes,
    compute_max_magnitudes,
    sample,
)
from raytrec.checks.live.outcome import (
    Check,
    CheckedRun,
    Outcome,
    Position,
    find_deviating_ranks,
    format_ranks,
    read_flat_values,
)
from raytrec.checks.live.probe import find_largest_error
from raytrec.checks.live.registry import list_builtin_checks, make_stop_error
from raytrec.checks.live.shards import _find_gaps
from raytrec.common.collectives import Peers
from raytrec.embeddings.tables import Shard, ShardedValues, Table
from raytrec.embeddings.taps import Lookup, iterate_keys

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_depends_on_every_bit(dtype):
    values = torch.randn(5).to(dtype)
    before, seen = int(fingerprint(values)), set()
    raw = values.view(torch.uint8)
    for byte in range(len(raw)):
        for bit in range(1 if dtype == torch.bool else 8):
            raw[byte] ^= 1 << bit
            seen.add(int(fingerprint(values)))
            raw[byte] ^= 1 << bit
    assert int(fingerprint(values)) == before and before not in seen
    assert len(seen) == len(raw) * (1 if dtype == torch.bool else 8), "two changes have the same hash"


def test_hash_multipliers_are_odd():
    assert bool((_make_multipliers(CHUNK["cpu"], torch.device("cpu")) % 2 == 1).all()), (
        "odd multipliers have an inverse"
    )


def test_two_sign_bit_changes_do_not_cancel():
    zeros = torch.zeros(8, dtype=torch.float64)
    signs = zeros.clone()
    signs[[2, 5]] = -0.0
    assert fingerprint(signs) != fingerprint(zeros)
    assert fingerprint(-torch.zeros(8)) != fingerprint(torch.zeros(8))


def test_fingerprint_depends_on_order_and_length():
    size = CHUNK["cpu"]
    values = torch.randn(3 * size + 5)
    for one, other in [(0, 1), (7, size + 7), (3, 3 * size + 3), (size - 1, size)]:
        swapped = values.clone()
        swapped[[one, other]] = values[[other, one]]
        assert fingerprint(swapped) != fingerprint(values), (one, other)
    whole = [int(fingerprint(torch.zeros(n))) for n in (0, 1, 2, size, size + 1)]
    assert len(set(whole)) == len(whole)
    assert fingerprint(values.view(-1, 1).expand(-1, 2)[:, 0]) == fingerprint(values), "strides are ignored"


@pytest.mark.parametrize("seed", range(30))
def test_shard_gaps_match_a_count_of_every_value(seed):
    g = np.random.default_rng(seed)
    rows, dim = int(g.integers(1, 12)), int(g.integers(1, 6))
    at = sorted({0, rows, *g.integers(0, rows + 1, 3).tolist()})
    boxes = [(range(a, b), range(dim)) for a, b in pairwise(at)]
    if seed % 3:  # a moved border, a missing shard or a duplicate
        i = int(g.integers(len(boxes)))
        start, stop = sorted(g.integers(0, rows + 2, 2).tolist())
        boxes[i] = range(start, stop), range(int(g.integers(0, 2)), dim)
    count, outside = np.zeros((rows, dim), dtype=int), False
    for r, c in boxes:
        outside |= bool(len(r) and len(c) and r.stop > rows)
        count[r.start : r.stop, c.start : c.stop] += 1
    shards = [Shard(rank, r, c, None) for rank, (r, c) in enumerate(boxes)]
    found = list(_find_gaps(ShardedValues((rows, dim), torch.float32, shards, False, torch.device("cpu"))))
    assert bool(found) == (bool((count != 1).any()) or outside), (boxes, found)


def test_deviating_ranks_differ_from_the_majority():
    assert find_deviating_ranks([1, 1, 1]) == [] and find_deviating_ranks([1, 2]) == [1]
    assert find_deviating_ranks([2, 1, 1]) == [0] and find_deviating_ranks([1, 2, None, 1]) == [1, 2]
    assert format_ranks([3]) == "rank 3" and format_ranks([0, 2, 3]) == "ranks 0, 2 and 3"
    assert format_ranks(list(range(100))) == "ranks 0, 1, 2, 3, 4, 5, 6 and 93 more"


def make_numerics(peers=None):
    return Numerics(SimpleNamespace(peers=peers or Peers(alone=True)))


def judge_sizes(numbers, step=1, values=0.5, gradient=0.1, ratios=None):
    return numbers.judge(Sizes({"table t": values}, {"table t": gradient**2}, ratios or {}), step)


def test_growth_is_relative_to_the_median_of_earlier_checks():
    numbers = make_numerics()
    assert all(judge_sizes(numbers, values=x).passed for x in (0.5, 500.0, 0.5)), "first checks only record"
    assert not judge_sizes(numbers, values=51.0).passed and judge_sizes(numbers, values=0.5).passed
    assert judge_sizes(numbers, values=49.0).passed
    assert "× its usual value" in judge_sizes(numbers, gradient=0.1 * MAX_GROWTH * 1.1).text
    assert judge_sizes(numbers, gradient=0.1 * MAX_GROWTH * 0.9).passed
    small = make_numerics()
    assert all(judge_sizes(small, values=x).passed for x in (1e-4, 1e-4, 1e-4, 0.5, 9.0)), "tables start near 0"
    rare = make_numerics()
    assert all(judge_sizes(rare, gradient=x).passed for x in (0, 0, 0, 0, 0.1, 0.1, 0.1)), "no ids at first"
    assert not judge_sizes(rare, gradient=20.0).passed


def test_numerics_leaves_nonfinite_values_to_finite_check():
    nan, inf = float("nan"), float("inf")
    both = [("t", torch.tensor([nan])), ("t", torch.tensor([2.0])), ("u", torch.tensor([-3.0, 1.0]))]
    for parts in (both, both[::-1]):
        assert str(compute_max_magnitudes(parts)["t"]) == "nan" and compute_max_magnitudes(parts)["u"] == 3.0
    numbers = make_numerics()
    assert all(judge_sizes(numbers, values=0.5).passed for _ in range(3))
    assert all(judge_sizes(numbers, values=x).passed for x in (inf, nan, inf, nan, inf)), "left to finite check"
    assert not judge_sizes(numbers, gradient=nan).passed
    assert not judge_sizes(numbers, values=51.0).passed, "nonfinite values are not recorded"


def test_gradient_norm_covers_the_whole_gradient():
    dense, table = "dense layers' top.0.bias", "table t"
    usual, alike = ({dense: 9.0, table: 8.0},) * 2, ({dense: 4e5, table: 1.0},) * 2
    parts = [usual, usual, usual, usual, ({dense: 9.0, table: 2e5}, {dense: 9.0, table: 4e5}), alike]
    parts += [({dense: 9.0, table: part}, usual[1]) for part in (1e-9, 1e4)]

    def judge(peers):
        numbers = make_numerics(peers)
        return [numbers.judge(Sizes({}, squares[peers.rank], {}), 1) for squares in parts]

    found, same = run_in_threads(2, judge)
    assert found == same
    assert all(outcome.passed for outcome in found[:4]) and found[3].figure == 1.0, "norm 5, usual norm 5"
    grown, other, less, more = found[4:]
    assert not grown.passed and "gradient is 775, 155 × its usual value" in grown.text
    assert "from table t" in grown.text
    assert "is 632, 126 ×" in other.text and other.text.endswith("from dense layers' top.0.bias")
    assert less.passed and more.passed, "one part of the gradient may change"


@pytest.mark.parametrize(
    "step,ratio,positives,passed",
    [
        (200, 1.4, 400, False),
        (200, 0.7, 500, False),
        (199, 1.4, 400, True),
        (200, 1.3, 10**6, True),
        (200, 1.4, 200, True),
        (200, 3.0, 4, True),
        (200, None, 10, True),
        (200, 1.4, 0, True),
    ],
)
def test_calibration_drift_is_detected(step, ratio, positives, passed):
    outcome = judge_sizes(make_numerics(), step, ratios={"calibration": (ratio, positives)})
    assert outcome.passed == passed
    assert passed or f"predicted ÷ actual rate is {ratio} over {positives} positives" in outcome.text
    one_of_two = {"click.calibration": (ratio, positives), "like.calibration": (1.0, 100)}
    outcome = judge_sizes(make_numerics(), step, ratios=one_of_two)
    assert outcome.passed == passed and (passed or f"rate of click is {ratio} over" in outcome.text)


def test_sampling_covers_every_row_in_turn():
    rows = 3 * SAMPLED_ROWS_PER_SHARD - 5
    shard = Shard(0, range(rows), range(1), torch.arange(rows).view(-1, 1))
    seen = set()
    for turn in range(3):
        some = sample(shard, turn)
        assert len(some) <= SAMPLED_ROWS_PER_SHARD
        seen |= set(some.flatten().tolist())
    assert len(seen) == rows


def test_finite_check_covers_rows_of_probed_step():
    rows = 10 * SAMPLED_ROWS_PER_SHARD
    values = torch.zeros(rows, 2)
    values[777] = float("nan")
    whole = ShardedValues((rows, 2), values.dtype, [Shard(0, range(rows), range(2), values)], False, values.device)
    table = Table("t", (rows, 2), values.dtype, "table_wise", "fused", whole, None, {}, None)
    ids = KeyedJaggedTensor(["a", "b"], torch.tensor([5, 6, 777]), lengths=torch.tensor([1, 1, 1, 0]))
    lookup = Lookup(None, ["a", "b"], ["other", "t"], False, torch.zeros(2), ids)
    for touched, expected in [(777, True), (778, False)]:
        ids.values()[2] = touched
        run = CheckedRun(
            make_small_config(1, {}), None, {"t": table}, {}, SimpleNamespace(lookups=[lookup]), values.device
        )
        check = Finite(run)
        for probed in (False, True):
            outcome = check.evaluate(Position(1), probed)
            assert outcome.passed != (probed and expected)


def test_select_bags_skips_too_long_bags():
    lengths = torch.tensor([0, 2, LONGEST_BAG + 1, LONGEST_BAG, 1])
    ids = torch.arange(int(lengths.sum()))
    weights = torch.rand(len(ids)) + 0.5
    sparse = KeyedJaggedTensor(["a", "b"], ids, weights, lengths=torch.cat([lengths, 0 * lengths]))
    key, empty = iterate_keys(sparse, 2)
    for mean in (False, True):
        bags = select_bags(key, torch.tensor([0, 1, 2]), mean, ids.device)
        assert bags.at.tolist() == [0, 1, 3], "the longest allowed bag comes last"
        assert bags.ids.tolist() == [0, 1, *range(LONGEST_BAG + 3, 2 * LONGEST_BAG + 3)]
        assert bags.bag.tolist() == [1, 1, *[2] * LONGEST_BAG]
        divisor = weights[:2].sum() if mean else 1.0
        assert torch.allclose(bags.factors[:2], weights[:2] / divisor)
    assert select_bags(empty, torch.tensor([4]), True, ids.device).ids.tolist() == []


def test_errors_are_relative_to_the_summed_magnitudes():
    nan, inf = float("nan"), float("inf")
    got, expected = torch.tensor([[1.0, 2.0], [nan, 8.0]]), torch.tensor([[1.0, 2.5], [nan, 9.0]])
    assert find_largest_error(got, expected, torch.tensor([1.0, 4.0])) == (0.5, 0, 1)
    assert find_largest_error(got, expected, torch.tensor([4.0, 4.0])) == (0.25, 1, 1)
    assert find_largest_error(got, got, torch.zeros(2)) == (0.0, 0, 0)
    assert find_largest_error(got, expected.nan_to_num(), torch.ones(2)) == (inf, 1, 0)
    assert find_largest_error(got[:0], expected[:0], torch.ones(0)) == (0.0, 0, 0)


def make_outcome(check, passed, text="text"):
    return Outcome(check=check, step=7, passed=passed, figure=None, limit=1.0, text=text)


def test_verdict_stops_only_for_stop_reactions():
    settings = make_small_config(2, {"sharding_type": "row_wise"})
    assert make_stop_error([make_outcome("replicas", True), make_outcome("numerics", False)], settings) is None, (
        "it only warns"
    )
    error = make_stop_error([make_outcome("shards", False, "one"), make_outcome("replicas", False, "two")], settings)
    assert "one" in error.what and "two" in error.what and error.where == "step 7, shards and replicas"
    assert "raytrec train --resume" in error.do and "checks.shards=warn" in error.do
    settings.checks.shards = settings.checks.replicas = "warn"
    assert make_stop_error([make_outcome("shards", False), make_outcome("replicas", False)], settings) is None
    assert all(check.do for check in list_builtin_checks())


def test_outcomes_are_json_serializable():
    class Mine(Check):
        name = "mine"

    found = Mine(None).outcome(7, ["this", "that"], "well", float("nan"), 1.0).line()
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "unix_s": None, "check": "mine", "step": 7, "passed": False, "figure": None, "limit": 1.0,
        "text": "this; that",
    }  # fmt: skip


RATES = {"sgd": 0.5, "adagrad": 0.1, "adam": 0.01}
FAST_CASES = [("row_wise", "adagrad")]  # cases of `make test`
LONG_CASES = [
    pytest.param(sharding, optimizer, lr, marks=[] if (sharding, optimizer) in FAST_CASES else pytest.mark.survive)
    for sharding in ("row_wise", "column_wise", "data_parallel")
    for optimizer, lr in RATES.items()
]


@pytest.mark.parametrize("sharding,optimizer,lr", LONG_CASES)
def test_ordinary_training_passes_all_checks(sharding, optimizer, lr):
    settings = {"optimizer": optimizer, "lr": lr, "dense": optimizer, "steps": 200, "every": 5}
    assert not failed_outcomes(run_on_ranks(2, run_with_fault, {"sharding_type": sharding}, None, settings))


def test_disabled_checks_are_not_run():
    checks = {check.name: "off" for check in list_builtin_checks() if check.name != "conservation"}
    answers = run_on_ranks(2, run_with_fault, SHARDING_PLANS["row-wise"], None, {"checks": checks})
    assert {outcome["check"] for outcome in answers[0]} == {"conservation"}


def test_checks_support_tensors_on_two_devices():
    """torch keeps an optimizer's step count in host memory."""
    torch.manual_seed(0)
    of_host = {"dense/a/value": torch.randn(100), "dense/a/sum": torch.rand(100), "dense/a/step": torch.tensor(4.0)}
    settings, found = make_small_config(1, {}), []
    with use_stand_in_gpu() as gpu:
        of_gpu = {n: t if n.endswith("step") else t.clone().to("cuda") for n, t in of_host.items()}
        for dense in (of_host, of_gpu):
            run = CheckedRun(settings, None, {}, dense, SimpleNamespace(lookups=[]), dense["dense/a/value"].device)
            gpu.waits.clear()
            found.append([Replicas(run).hashes(), Finite(run).sizes(False)])
    assert found[0] == found[1]
    sizes = {name: float(value.abs().max()) for name, value in of_host.items()}
    assert found[0][1] == sizes and sizes["dense/a/step"] == 4.0


def test_read_copies_once_per_device_and_dtype():
    with use_stand_in_gpu() as gpu:
        tensors = [torch.arange(3).to("cuda"), torch.tensor(2.5), torch.ones(2, 2).to("cuda"), torch.tensor(7)]
        tensors += [torch.zeros(0).to("cuda"), torch.tensor(2**62 + 1).to("cuda")]
        gpu.waits.clear()
        assert read_flat_values(tensors) == [[0, 1, 2], [2.5], [1.0] * 4, [7], [], [2**62 + 1]]
        assert [wait.what for wait in gpu.waits] == ["tolist"] * 2, "one copy for int64, one for float32"
    assert read_flat_values([]) == []


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["row-wise", "table-wise", "data-parallel", "dense"])
def test_all_checks_pass_on_gpus(plan):
    """The outcomes are the same as on CPU, up to rounding errors."""
    settings = {"optimizer": "adagrad", "dense": "adam", "max_grad_norm": 10.0 if plan == "row-wise" else None}
    found = {
        kind: run_on_ranks(2, run_with_fault, SHARDING_PLANS[plan], None, settings | {"device": kind}, device=kind)
        for kind in ("cuda", "cpu")
    }
    assert not failed_outcomes(found["cuda"])
    outcomes = [[(o["check"], o["step"], o["text"]) for o in found[kind][0]] for kind in ("cuda", "cpu")]
    assert outcomes[0] == outcomes[1]

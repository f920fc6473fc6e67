"""The bottleneck of a run: parts of its time, from made-up lines and from lines of real ranks."""

import json
from html import unescape

import pytest
import recorded
from ranks import run_on_ranks
from recorded import rank_line, write_recorded_run

from raytrec.common.messages import RankLine
from raytrec.report.findings import Times, find_bound
from raytrec.tracking.history import select_recorded_ranks

STEPS = 7
PHASES = dict(zip(recorded.PHASES, (1.0, 0.5, 1.0, 4.0, 6.0, 8.0, 2.0, 3.0, 1.5), strict=True))


def sum_times(*lines):
    times = Times()
    for line in lines:
        times.add(line)
    return times


def make_rank_line(seconds=PHASES, steps=100, **fields):
    return RankLine(**rank_line([], 0, 1, 100) | {"phases_s": dict(seconds), "steps": steps, **fields})


def test_bound_lists_seconds_and_shares_of_every_part():
    found = find_bound(sum_times(make_rank_line()), 40.0, 1000.0)
    parts = found["bound.parts"]
    seconds = {"dense model": 6 + 8 + 2, "tables": 4, "exchange": 4, "ingest": 1.5, "start": 40 - 25.5}
    assert {name: part["seconds"] for name, part in parts.items()} == seconds
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    assert found["bound.by"] == "dense model" and found["bound.share"] == pytest.approx(16 / 40)
    assert found["bound.sentence"] == "bound by dense model: 40 % of the time"


@pytest.mark.parametrize(
    "phase, sentence",
    [
        ("tables", "bound by tables: 79 % of the time"),
        ("collectives", "bound by exchange: 79 % of the time"),
        ("data", "bound by ingest: 77 % of the time, waiting for batches, at 1,000 rows/s"),
        ("other", "bound by start: 74 % of the time, 1 min 14 s, went into start-up, restarts, "),
    ],
)
def test_bound_sentence_describes_the_largest_part(phase, sentence):
    found = find_bound(sum_times(make_rank_line(PHASES | {phase: 80.0})), 100.0, 1000.0)
    assert found["bound.sentence"].startswith(sentence)


def test_start_bound_also_names_the_bound_of_steps():
    sentence = find_bound(sum_times(make_rank_line()), 400.0, 1000.0)["bound.sentence"]
    assert sentence.endswith("; steps are bound by dense model: 63 % of their time")


def test_times_average_ranks_and_exclude_first_steps():
    first = {"forward": 2.0}
    slow = make_rank_line({"forward": 8.0}, 11, world=2, first_s=first)
    quick = make_rank_line({"forward": 4.0}, 11, world=2, first_s=first)
    times = sum_times(slow, quick)
    assert times.seconds["forward"] == (6 + 2) / 2 and times.steps == 10


def test_times_average_recorded_ranks_of_a_large_group():
    times = sum_times(
        *(make_rank_line({"forward": 3.0}, 10, rank=rank, world=1024) for rank in select_recorded_ranks(1024))
    )
    assert times.seconds["forward"] == pytest.approx(3.0) and times.steps == pytest.approx(10)


def test_bound_is_empty_without_steps():
    assert find_bound(Times(), 5.0, None) == {}


def train_with_slow_batches(rank, world, changes, slow, folder):
    """Train on batches that take `slow` seconds each; return the lines of this rank."""
    from time import sleep

    import loop

    off = ["checks.every_steps=null", "checks.at_checkpoints=false", "tracking.every_steps=3"]
    made = loop.make_worker_loop(rank, world, STEPS, [*off, *changes], folder)
    given = made.batches._batches

    def batches():
        for batch in given:
            sleep(slow)
            yield batch

    made.batches._batches = batches()
    made.train(STEPS)
    return [RankLine(**said) for said in made.said if said.pop("kind") == "rank"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "slow, changes, by", [(0.2, [], "ingest"), (0.0, ["model.top_mlp=[1500,1500]"], "dense model")]
)
def test_bound_of_real_ranks_names_the_slow_part(tmp_path, slow, changes, by):
    """Only the steps after the first one count."""
    (lines,) = run_on_ranks(1, train_with_slow_batches, changes, slow, str(tmp_path))
    times = sum_times(*lines)
    assert times.steps == STEPS - 1
    found = find_bound(times, sum(times.seconds.values()), 100.0)
    assert found["bound.by"] == by and found["bound.share"] > 0.3


@pytest.mark.slow
def test_bound_is_shown_on_console_report_and_comparison(tmp_path, capsys):
    from raytrec.driver.console import Result, print_summary
    from raytrec.report.compare import compare
    from raytrec.report.report import build

    found = find_bound(sum_times(make_rank_line()), 40.0, 1000.0)
    sentence = found["bound.sentence"]
    for name in ("a", "b"):
        write_recorded_run(tmp_path / name)
        result = json.loads((tmp_path / name / "result.json").read_text())
        (tmp_path / name / "result.json").write_text(json.dumps(result | found))
    print_summary(Result(result | found, tmp_path))
    said = capsys.readouterr().out
    assert sentence in said.splitlines() and "dense model" in said.partition("share of the time")[0]
    page = unescape(build(tmp_path / "a")[0].read_text())
    assert f"<p>{sentence}</p>" in page and "exchange" in page
    compared = compare([tmp_path / "a", tmp_path / "b"])
    assert compared.results["bound.by"] == ["dense model"] * 2
    assert compared.results["bound.share"] == ["40%", "40% (+0%)"]

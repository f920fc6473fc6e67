"""What bounds a run: parts of its time, by hand; the same from real ranks' lines."""

import json
from html import unescape

import pytest
import recorded
from ranks import on_ranks
from recorded import interval, record

from raytrec.common.messages import RankLine, select_recorded_ranks
from raytrec.report.findings import Times, find_bound

STEPS = 7
PHASES = dict(zip(recorded.PHASES, (1.0, 0.5, 1.0, 4.0, 6.0, 8.0, 2.0, 3.0, 1.5), strict=True))


def of(*lines):
    times = Times()
    for line in lines:
        times.add(line)
    return times


def line(seconds=PHASES, steps=100, **fields):
    return RankLine(**interval([], 0, 1, 100) | {"phases_s": dict(seconds), "steps": steps, **fields})


def test_parts_by_hand():
    found = find_bound(of(line()), 40.0, 1000.0)
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
def test_the_sentence_of_each_part(phase, sentence):
    found = find_bound(of(line(PHASES | {phase: 80.0})), 100.0, 1000.0)
    assert found["bound.sentence"].startswith(sentence)


def test_a_start_says_what_bounds_the_steps():
    sentence = find_bound(of(line()), 400.0, 1000.0)["bound.sentence"]
    assert sentence.endswith("; steps bound by dense model: 63 % of the time")


def test_ranks_are_averaged_and_first_steps_belong_to_the_start():
    first = {"forward": 2.0}
    slow = line({"forward": 8.0}, 11, world=2, first_s=first)
    quick = line({"forward": 4.0}, 11, world=2, first_s=first)
    times = of(slow, quick)
    assert times.seconds["forward"] == (6 + 2) / 2 and times.steps == 10


def test_of_a_large_group_the_recorded_ranks_are_averaged():
    times = of(*(line({"forward": 3.0}, 10, rank=rank, world=1024) for rank in select_recorded_ranks(1024)))
    assert times.seconds["forward"] == pytest.approx(3.0) and times.steps == pytest.approx(10)


def test_without_steps_nothing_is_found():
    assert find_bound(Times(), 5.0, None) == {}


def real(rank, world, changes, slow, folder):
    """This rank's lines of steps whose batches come as slowly as that."""
    from time import sleep

    import loop

    off = ["checks.every_steps=null", "checks.at_checkpoints=false", "tracking.every_steps=3"]
    made = loop.make(rank, world, STEPS, [*off, *changes], folder)
    given = made.batches._batches

    def batches():
        for batch in given:
            sleep(slow)
            yield batch

    made.batches._batches = batches()
    made.train(STEPS)
    return [RankLine(**said) for said in made.said if said.pop("kind") == "rank"]


@pytest.mark.parametrize(
    "slow, changes, by", [(0.2, [], "ingest"), (0.0, ["model.top_mlp=[1500,1500]"], "dense model")]
)
def test_slow_readers_are_ingest_and_a_large_dense_model_takes_the_most(tmp_path, slow, changes, by):
    """Of the steps after the first, by themselves."""
    (lines,) = on_ranks(1, real, changes, slow, str(tmp_path))
    times = of(*lines)
    assert times.steps == STEPS - 1
    found = find_bound(times, sum(times.seconds.values()), 100.0)
    assert found["bound.by"] == by and found["bound.share"] > 0.3


def test_it_is_on_the_console_in_the_report_and_in_comparisons(tmp_path, capsys):
    from raytrec.driver.console import Result, print_summary
    from raytrec.report.compare import compare
    from raytrec.report.report import build

    found = find_bound(of(line()), 40.0, 1000.0)
    sentence = found["bound.sentence"]
    for name in ("a", "b"):
        record(tmp_path / name)
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

"""What bounds a run: parts of its time and shares of limits, by hand; the same from real ranks' lines."""

import json
from html import unescape

import pytest
from ranks import on_ranks
from recorded import record

from raytrec.report.bounds import Times, find_bound

STEPS = 7
PHASES = {
    "data": 1.0,
    "copy": 0.5,
    "input_exchange": 1.0,
    "tables": 4.0,
    "forward": 6.0,
    "backward": 8.0,
    "optimizer": 2.0,
    "collectives": 3.0,
    "other": 1.5,
}
LIMITS = {
    "dense_flop": 3e9,
    "matrix_flop_per_s": 30e9,
    "table_bytes": 2e7,
    "gather_bytes_per_s": 1e9,
    "exchange_bytes": 1e6,
    "exchange_s": 0.01,
    "optimizer_table_share": 0.25,
}


def of(*lines):
    times = Times()
    for line in lines:
        times.add(line)
    return times


def line(seconds=PHASES, steps=100, **fields):
    return {"phases_s": dict(seconds), "steps": steps, "world": 1, **fields}


def test_parts_and_limits_by_hand():
    found = find_bound(of(line()), LIMITS, 40.0, 1000.0)
    parts = found["bound.parts"]
    assert {name: part["seconds"] for name, part in parts.items()} == {
        "dense arithmetic": 6 + 8 + 0.75 * 2,
        "table bandwidth": 4 + 0.25 * 2,
        "exchange": 4,
        "ingest": 1.5,
        "start": 40 - 25.5,
    }
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    assert parts["dense arithmetic"]["of_limit"] == pytest.approx(0.1 * 100 / 15.5)
    assert parts["table bandwidth"]["of_limit"] == pytest.approx(0.02 * 100 / 4.5)
    assert parts["exchange"]["of_limit"] == pytest.approx(0.01 * 100 / 4)
    assert parts["ingest"]["of_limit"] is parts["start"]["of_limit"] is None
    assert found["bound.by"] == "dense arithmetic" and found["bound.share"] == pytest.approx(15.5 / 40)
    assert found["bound.sentence"] == (
        "bound by dense arithmetic: 39 % of the time, at 65 % of this machine's matrix rate"
    )


@pytest.mark.parametrize(
    "phase, sentence",
    [
        (
            "tables",
            "bound by table bandwidth: 79 % of the time, at 2.5 % of this machine's rate for random rows",
        ),
        ("collectives", "bound by exchange: 79 % of the time, at 1.2 % of the speed of its collectives by"),
        ("data", "bound by ingest: 77 % of the time, waiting for batches, at 1,000 rows/s"),
        (
            "other",
            "bound by start: 74 % of the time, 1 min 14 s, went into start-up, restarts, checkpoints and",
        ),
    ],
)
def test_the_sentence_of_each_part(phase, sentence):
    found = find_bound(of(line(PHASES | {phase: 80.0})), LIMITS, 100.0, 1000.0)
    assert found["bound.sentence"].startswith(sentence)


def test_a_start_says_what_bounds_the_steps():
    sentence = find_bound(of(line()), LIMITS, 400.0, 1000.0)["bound.sentence"]
    assert sentence.endswith(
        "; steps by dense arithmetic: 61 % of the time, at 65 % of this machine's matrix rate"
    )


def test_ranks_are_averaged_and_first_steps_belong_to_the_start():
    first = {"forward": 2.0}
    slow = line({"forward": 8.0}, 11, world=2, first_s=first)
    quick = line({"forward": 4.0}, 11, world=2, first_s=first)
    times = of(slow, quick)
    assert times.seconds["forward"] == (6 + 2) / 2 and times.steps == 10


def test_without_limits_or_steps():
    assert find_bound(Times(), LIMITS, 5.0, None) == {}
    found = find_bound(of(line()), {}, 30.0, None)
    assert found["bound.of_limit"] is None
    assert found["bound.sentence"] == "bound by dense arithmetic: 53 % of the time"


def real(rank, world, changes, slow, folder):
    """(limits, this rank's lines) of steps whose batches come as slowly as that."""
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
    lines = [said for said in made.said if said["kind"] == "rank"]
    return made.observers.result()["limits"], lines


def bound(folder, *, slow=0.0, changes=()):
    """What bounds the steps after the first, by themselves."""
    ((limits, lines),) = on_ranks(1, real, list(changes), slow, str(folder))
    times = of(*lines)
    assert times.steps == STEPS - 1
    return find_bound(times, limits, sum(times.seconds.values()), 100.0)


def test_slow_readers_are_ingest(tmp_path):
    found = bound(tmp_path, slow=0.2)
    assert found["bound.by"] == "ingest" and found["bound.share"] > 0.5


def test_a_large_dense_model_is_dense_arithmetic(tmp_path):
    found = bound(tmp_path, changes=["model.top_mlp=[1500,1500]"])
    assert found["bound.by"] == "dense arithmetic" and 0.02 < found["bound.of_limit"] < 1.5


def test_it_is_on_the_console_in_the_report_and_in_comparisons(tmp_path, capsys):
    from raytrec.driver.console import print_result
    from raytrec.driver.run import Result
    from raytrec.report.compare import compare
    from raytrec.report.report import build

    found = find_bound(of(line()), LIMITS, 40.0, 1000.0)
    sentence = found["bound.sentence"]
    for name in ("a", "b"):
        record(tmp_path / name)
        result = json.loads((tmp_path / name / "result.json").read_text())
        (tmp_path / name / "result.json").write_text(json.dumps(result | found))
    print_result(Result(result | found, tmp_path))
    said = capsys.readouterr().out
    assert sentence in said.splitlines() and "dense arithmetic" in said.partition("share of the time")[0]
    page = unescape(build(tmp_path / "a").read_text())
    assert f"<p>{sentence}</p>" in page and "table bandwidth" in page
    compared = compare([tmp_path / "a", tmp_path / "b"])
    assert compared.results["bound.by"] == ["dense arithmetic"] * 2
    assert compared.results["bound.of_limit"] == ["65%", "65% (+0%)"]

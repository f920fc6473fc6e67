"""Messages are written as lines of a run folder and read back unchanged."""

import json
from dataclasses import replace

import pytest
import recorded

from raytrec.common import messages
from raytrec.common.documents import CLASSES, from_line

FIGURES = {"logloss": 0.5, "ctr.ne": None, "rows": 128}
EXAMPLES = [
    messages.Phase(text="planning"),
    messages.Warn(text="no checkpoint of step 3"),
    messages.Start(unix_s=1.5, total=9, step=3, workers=2, plan=[{"table": "user"}], metrics=[{"key": "ne"}]),
    messages.Saved(unix_s=1.5, step=3, folder="c/step-3", error=None, blocked_s=0.1, seconds=0.5),
    messages.Stopped(unix_s=1.5, step=3),
    messages.Event(event="failed", unix_s=1.5, details={"cause": "rank 1 died", "rank": 1, "again": True}),
    messages.Train(step=3, unix_s=1.5, figures=FIGURES),
    messages.Eval(step=3, unix_s=1.5, figures=FIGURES, curves={"roc": {"x": [0, 1]}}),
    messages.Final(step=3, unix_s=1.5, figures=FIGURES),
    messages.Result(step=9, unix_s=1.5, figures={"eval.ne": 0.9}),
    messages.Compared(step=0, unix_s=1.5, figures={"check.forward.error": 1e-7}),
    messages.Outcome(check="shards", step=3, unix_s=1.5, passed=True, figure=None, limit=None, text=""),
    messages.RankLine(**recorded.rank_line(["user"], 0, 1, 100)),
]


def test_every_message_class_has_an_example():
    assert {type(message) for message in EXAMPLES} == set(CLASSES.values())


@pytest.mark.parametrize("message", [message for message in EXAMPLES if message.FILE], ids=lambda message: message.KIND)
def test_messages_round_trip_through_lines(message):
    line = json.loads(json.dumps(message.line()))
    assert not set(message.LEFT_OUT) & set(line)
    there = from_line(message.FILE, line)
    assert type(there) is type(message)
    left_out = {name: getattr(message, name) for name in message.LEFT_OUT}
    assert replace(there, **left_out) == message


@pytest.mark.parametrize("event", recorded.EVENTS, ids=lambda event: f"{event['event']}-{event['unix_s']}")
def test_recorded_events_are_read_as_their_class(event):
    message = from_line(messages.EVENTS, event)
    kind = event["event"] if event["event"] in ("start", "saved") else "event"
    assert kind == message.KIND and message.unix_s == event["unix_s"]
    assert {**message.values(), "event": event["event"]}.items() >= event.items()


def test_metric_lines_keep_any_name():
    line = {"kind": "train", "unix_s": 1.0, "step": 3, "my.metric": 0.25, "figures": 3}
    assert from_line(messages.METRICS, line).figures == {"my.metric": 0.25, "figures": 3}
    assert messages.Train(step=3, figures={"my.metric": 0.25}).line()["my.metric"] == 0.25

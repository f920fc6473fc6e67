"""`make soak-serve`: continuous requests while versions are swapped and replicas killed.

    python tests/serving/soak.py [--requests 200000] [--clients 8] [--smallest]

`raytrec serve --replicas 2` runs on this machine. The clients run in a separate process, with the retries of
docs/serving.md. The events are promotions, rollbacks, an export with a damaged table, an export with a wrong
golden row, and three SIGKILLs of a replica, one of them during a promotion.

Every answer is compared with the scores that `raytrec.load` computes for its version. An answer is wrong if a
score differs, if its version is not served, or if the request began after a promotion and another version
answered. A kill affects a request if the request overlaps the time from the kill until the replica is
considered ended. The exit status is 1 after a wrong answer, a request that fails despite its retries, a retry
outside of these times, or if a replica maps files of an export other than the current and the previous one.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS / "parity")]

import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from services import (  # noqa: E402
    change_golden_score,
    command_line,
    copy_export,
    corrupt_table,
    export_in_all_precisions,
    mapped_folders,
    resident_mib,
    run_service,
)
from soak_clients import ANY_VERSION, NOTE_KINDS, SoakState, make_requests, run_clients  # noqa: E402
from waiting import wait_for  # noqa: E402

from raytrec.common.errors import RunError  # noqa: E402
from raytrec.serving.command import promote  # noqa: E402
from raytrec.serving.coordinator import REPLICA_TIMEOUT_S  # noqa: E402

REPLICAS = 2
MAX_MAPPED_EXPORTS = 2  # per replica: the current and the previous export
# Events in order: swaps, refused promotions and kills. The service starts with the export `whole`.
EVENTS = ["small", "kill", "half", "damaged", "small", "rollback", "killed promotion", "wrong golden row"]
EVENTS += ["small", "kill", "half", "rollback"]
SMOKE_EVENTS = ["small", "killed promotion", "damaged"]


class Swaps:
    """Events that are applied to the service, and the version that it must answer with."""

    def __init__(self, service, made, root, state):
        self._service, self._made, self.root, self._state = service, made, root, state
        self.now, self._before, self._copies = "whole", "whole", 0
        self.kills, self.table = [], []  # wall-clock seconds; (event, seconds)

    def happen(self, event):
        """Apply one of EVENTS and wait until all replicas have the expected version."""
        began = time.monotonic()
        if event == "kill":
            self._kill()
        elif event == "killed promotion":
            self._promote("whole", kill=True)
        elif event in ("damaged", "wrong golden row"):
            self._refuse(corrupt_table if event == "damaged" else change_golden_score)
        else:
            self._promote(event)
        self.table.append((event, time.monotonic() - began))
        wait_for(
            lambda: self._service.versions() == [self._version(self.now)] * REPLICAS,
            f"{event}: replicas of {self.now}",
            3 * REPLICA_TIMEOUT_S,
        )

    def _version(self, name):
        return self._made[name].version

    def _copy(self, name, change=lambda copy: None):
        self._copies += 1
        return copy_export(self._made[name].path, self.root / str(self._copies), change)

    def _promote(self, name, kill=False):
        """Promote a fresh copy of an export, or roll back to the previous version."""
        back = name == "rollback"
        target, uri = (self._before, None) if back else (name, self._copy(name))
        self._state.change(ANY_VERSION)
        outcome = []

        def ask():
            try:
                outcome.append(promote(uri, service=self._service.url, name=None, rollback=back))
            except RunError as error:
                outcome.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        if kill:
            time.sleep(0.2)
            self._kill()
        asking.join(4 * REPLICA_TIMEOUT_S)
        if kill and isinstance(outcome[0], RunError):  # the request went to the killed replica
            ask()
        assert outcome and outcome[-1] == self._version(target), f"{name}: {outcome}"
        self.now, self._before = target, self.now
        self._state.change(list(self._made).index(self.now))

    def _refuse(self, change):
        try:
            promote(self._copy("whole", change), service=self._service.url, name=None)
        except RunError as error:
            assert "differs from the exported file" in error.what or "exported scores" in error.what, error
        else:
            raise AssertionError(f"{change.__name__}: the export was promoted")

    def _kill(self):
        """Kill a replica and wait for its replacement."""
        self._service.replicas()[0].kill()
        self.kills.append(time.time())
        time.sleep(REPLICA_TIMEOUT_S + 1)  # until it is no longer counted as a replica
        wait_for(lambda: len(self._service.versions()) == REPLICAS, "the replacement of a killed replica", 90)


def _swap(service, swaps, events, requests, state):
    """Apply all events, spread over the requests; return the memory use before and after."""
    found = {}
    for number, event in enumerate(events, 1):
        until = number * requests // (len(events) + 1)
        wait_for(lambda until=until: state.asked.value >= until, f"{until:,} requests", 3600)
        found.setdefault("before", _held(service, swaps))
        swaps.happen(event)
    state.end()
    wait_for(lambda: state.asked.value > requests, f"{requests:,} requests", 3600)
    return found | {"after": _held(service, swaps), "events": swaps.table, "kills": swaps.kills}


def _held(service, swaps):
    """Return (process, private MiB, mapped exports) of every replica and the proxy."""
    processes = service.replicas()
    return [
        (f"{command_line(p).split(':')[2]} {p.pid}", resident_mib(p), mapped_folders(p, swaps.root)) for p in processes
    ]


def _show(report, counts, notes):
    """Print all figures. Return True if there was no error."""
    kills, by = report["kills"], {kind: [note for note in notes if note[0] == kind] for kind in NOTE_KINDS}
    others = [note for note in by["retried"] if not _in_hands(note, kills)]
    held = {name: exports for name, _, exports in report["after"] if len(exports) > MAX_MAPPED_EXPORTS}
    answers = {name: count for name, count in counts.items() if name not in NOTE_KINDS}
    rows = {"answers": sum(answers.values()), **answers, "wrong": len(by["wrong"]), "failed": len(by["failed"])}
    rows["failed attempts affected by a kill"] = len(by["retried"]) - len(others)
    rows["other failed attempts"] = len(others)
    seconds = report["seconds"]
    rows |= {"seconds": f"{seconds:.0f}", "answers/s": f"{rows['answers'] / seconds:.0f}"}
    _print("make soak-serve", rows.items())
    _print("events", [(name, f"{took:.1f} s") for name, took in report["events"]])
    for moment in ("before", "after"):
        lines = [(name, f"{mib} MiB; {len(exports)} exports") for name, mib, exports in report[moment]]
        _print(f"{moment} the events", lines)
    for note in [*by["wrong"], *by["failed"], *others][:20]:
        print(*note)
    print("\n".join(f"{name} still maps {', '.join(exports)}" for name, exports in held.items()))
    return not (by["wrong"] or by["failed"] or others or held)


def _in_hands(note, kills):
    """Return True if a request overlaps the time from a kill until the replica is considered ended."""
    _, began, ended, _ = note
    return any(began < kill + REPLICA_TIMEOUT_S and ended > kill for kill in kills)


def _print(title, lines):
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in lines:
        table.add_row(str(name), f"{value:,}" if isinstance(value, int) else value)
    Console().print(table)


def main(
    requests: Annotated[int, typer.Option(help="Minimum number of requests.")] = 200_000,
    clients: Annotated[int, typer.Option(help="Number of concurrent clients.")] = 8,
    smallest: Annotated[bool, typer.Option(help="Run a short smoke test.")] = False,
) -> None:
    """Run the soak test and print its results."""
    requests, events = (600, SMOKE_EVENTS) if smallest else (requests, EVENTS)
    with tempfile.TemporaryDirectory(prefix="raytrec-soak-") as scratch:
        root = Path(scratch)
        made, rows = export_in_all_precisions(root)
        asked, versions = make_requests(made, rows), [each.version for each in made.values()]
        with run_service(made["whole"].path, REPLICAS, root) as service:
            state, results = SoakState(requests), multiprocessing.Queue()
            asking = multiprocessing.Process(
                target=run_clients,
                args=(service.url, asked, versions, state),
                kwargs={"clients": clients, "results": results},
            )
            began = time.monotonic()
            asking.start()
            try:
                report = _swap(service, Swaps(service, made, root, state), events, requests, state)
                found = results.get()
            finally:
                state.end()
                asking.terminate()
            report |= {"seconds": time.monotonic() - began}
    raise typer.Exit(not _show(report, *found))


if __name__ == "__main__":
    typer.run(main)

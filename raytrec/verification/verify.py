"""Compare all rows, managed ids and dense weights of a service with a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import islice
from time import monotonic, perf_counter, sleep
from typing import Any
from urllib.parse import urlencode

from raytrec.checkpoint.files import find, find_step
from raytrec.common.errors import RunError
from raytrec.common.formatting import format_percent
from raytrec.common.storage import make_absolute, query_file_info, split_query
from raytrec.driver.console import Result, RunConsole
from raytrec.scoring.manifest import format_version
from raytrec.serving.command import parse_address, parse_error
from raytrec.serving.options import find_token
from raytrec.serving.served_state import REPLICA_HEADER, StatePart, to_bytes
from raytrec.verification.stored_state import StoredState

MAX_STARTS, RESTART_DELAY_S = 3, 1.0  # number of attempts, and delay before the next, if the service changes
MAX_EXAMPLES = 3  # maximum number of differing values reported for each table, id map and weight
RESPONSE_TIMEOUT_S = 60
CONNECT_TIMEOUT_S = 30  # time within which each replica must respond; an ended replica is listed for 15 s
CONNECT_INTERVAL_S = 0.05


class ServiceChangedError(Exception):
    """Signal that a comparison must start over: a version or replica has changed, or a replica does not respond."""


class ReplicaConnection:
    """HTTP connection to one replica of a service. The replica must not change its version.

    The first response determines the replica.

    Args:
        service: Address of the service.
        token: Token of the service; "": no token is sent.

    Attributes:
        replica: Id of the replica.
        state: Response to GET /state.

    Raises:
        RunError: The address is invalid, or as for `get`.
    """

    def __init__(self, service: str, token: str):
        url = parse_address(service)
        self._service, self._path = service, url.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        self._connection = kind(url.netloc, timeout=RESPONSE_TIMEOUT_S)
        self.replica: str | None = None
        self._version: str | None = None
        self.state: dict[str, Any] = json.loads(self.get("/state"))

    def get(self, path: str, **query: Any) -> bytes:
        """Send a GET request, and return the body of this replica's response; reconnect if another replica responds.

        Raises:
            RunError: The service does not respond to the first request, refuses a request, or names no replica.
            ServiceChangedError: The replica has changed its version, no longer responds, or is not reached within
                CONNECT_TIMEOUT_S.
        """
        deadline = monotonic() + CONNECT_TIMEOUT_S
        while monotonic() < deadline:
            try:
                self._connection.request("GET", f"{self._path}{path}?{urlencode(query)}", headers=self._headers)
                answer = self._connection.getresponse()
                content = answer.read()
            except (OSError, HTTPException) as error:
                if self.replica is None:
                    what, do = f"the service does not respond: {error}", "check the address, and that the service runs"
                    raise RunError(what, where=self._service, do=do) from None
                raise ServiceChangedError(f"replica {self.replica} does not respond: {error}") from None
            if answer.status != 200:
                what = f"the service responds with status {answer.status} to GET {self._path}{path}"
                raise parse_error(content, what, self._service, answer.status)
            replica, version = answer.getheader(REPLICA_HEADER, self.replica), answer.getheader("X-Model-Version")
            if replica is None:
                raise RunError(
                    f"the response names no replica: it lacks the header {REPLICA_HEADER}",
                    where=self._service,
                    expected="the address of a raytrec service; proxies must pass the header on",
                )
            if self.replica in (None, replica):
                if self._version not in (None, version):
                    raise ServiceChangedError(f"the version has changed from {self._version} to {version}")
                self.replica, self._version = replica, version
                return content
            self._connection.close()  # the kernel has selected another replica
            sleep(CONNECT_INTERVAL_S)
        raise ServiceChangedError(f"replica {self.replica} cannot be reached again")


def connect(service: str, token: str) -> tuple[list[ReplicaConnection], list[str]]:
    """Return a connection to each replica of a service, and the sorted ids of its replicas that were not reached.

    The kernel selects the replica for a connection. Connections are therefore opened until each replica has responded,
    or until CONNECT_TIMEOUT_S has passed. Errors are those of `ReplicaConnection` and its method `get`.
    """
    replicas: dict[str, ReplicaConnection] = {}
    deadline = monotonic() + CONNECT_TIMEOUT_S
    while True:
        connection = ReplicaConnection(service, token)
        replicas.setdefault(connection.replica, connection)
        missing = sorted(json.loads(connection.get("/versions")).keys() - replicas.keys())
        if not missing or monotonic() > deadline:
            return [*replicas.values()], missing
        sleep(CONNECT_INTERVAL_S)


@dataclass
class Difference:
    """Difference between a replica and a checkpoint.

    Attributes:
        replica: Id of the replica.
        part: Part of the state: rows, ids or dense.
        name: Name of the table or weight.
        count: Number of differing rows, ids or dense values; 0: the dtypes or shapes differ, or a side is missing.
        largest: Largest absolute difference of values; infinite if a differing value is NaN; 0 for ids.
        examples: Descriptions of the first MAX_EXAMPLES differing values, or a description of the dtypes and shapes.
    """

    replica: str
    part: StatePart
    name: str
    count: int = 0
    largest: float = 0.0
    examples: list[str] = field(default_factory=list)

    def add(self, count: int, largest: float, examples: Iterable[str]) -> None:
        """Add the differing values of a block, as returned by StoredState.compare."""
        self.count, self.largest = self.count + count, max(self.largest, largest)
        self.examples = [*self.examples, *islice(examples, MAX_EXAMPLES)][:MAX_EXAMPLES]

    def __str__(self) -> str:
        largest = f"; largest difference {self.largest:.3g}" if self.largest else ""
        count = f"{self.count:,} differ{'s' * (self.count == 1)}, such as " if self.count else ""
        return f"{self.part} {self.name}: {count}{', '.join(self.examples)}{largest} (replica {self.replica})"


def verify(service: str, run: str, *, name: str | None = None) -> Result:
    """Compare all rows, managed ids and dense weights of each replica of a service with a checkpoint.

    Replicas compute digests of blocks between requests. Only blocks that differ are sent.

    Args:
        service: Address of the service.
        run: Run folder (its newest checkpoint), RUN/STEP, or checkpoint folder; local, s3:// or gs://.
        name: Name of the service, used to find its token file if RAYTREC_SERVE_TOKEN is not set; None: no
            file is read.

    Returns:
        Result with the metrics result (different; else incomplete if a replica was not reached; else equal),
        differences (see Difference), replicas and unreached_replicas (ids), tables, rows, ids and weights (their
        numbers), version, checkpoint, name and seconds.

    Raises:
        RunError: There is no checkpoint; or the service's address is invalid, or the service does not respond, refuses
            a request, is not from raytrec, serves a run or step other than that of the checkpoint, or interrupts
            MAX_STARTS comparisons (ServiceChangedError).
        CheckpointError, ConfigError, DataError: As for `find_checkpoint`; or a part of the checkpoint is damaged.
    """
    began, token = perf_counter(), find_token(name)
    folder, index = find_checkpoint(run)
    with RunConsole(name or service) as console:
        for number in range(1, MAX_STARTS + 1):
            try:
                replicas, missing = connect(service, token)
                _check_states(replicas, index["about"], folder, service)
                differences = _compare(replicas, StoredState(folder, index, replicas[0].state), console)
                break
            except ServiceChangedError as error:
                reason = str(error)
                console.warn(f"comparison {number} of at most {MAX_STARTS} was interrupted: {reason}")
                sleep(RESTART_DELAY_S)
        else:
            what = f"each of {MAX_STARTS} comparisons was interrupted, the last one because {reason}"
            do = "repeat the command while no version is promoted, no delta is applied, and all replicas keep running"
            raise RunError(what, where=service, do=do)
    state = replicas[0].state
    sizes = {"tables": len(state["rows"]), "rows": _count(state, "rows"), "ids": _count(state, "ids")}
    sizes["weights"] = len(state["dense"])
    metrics = {
        "name": f"{state['version']} and {folder}",
        "result": "different" if differences else "incomplete" if missing else "equal",
        "differences": [vars(each) for each in differences],
        "replicas": [each.replica for each in replicas],
        "unreached_replicas": missing,
        "version": state["version"],
        "checkpoint": folder,
        "seconds": round(perf_counter() - began, 3),
    }
    lines = [f"differs      {each}" for each in differences] + [f"not reached  replica {each}" for each in missing]
    pairs = [("result", metrics["result"]), ("replicas", f"{len(replicas)} of {len(replicas) + len(missing)}")]
    return Result(metrics | sizes, folder, lines, pairs + [(title, f"{size:,}") for title, size in sizes.items()])


def find_checkpoint(run: str) -> tuple[str, dict[str, Any]]:
    """Return the folder of a checkpoint, and its index, given a run folder (newest), RUN/STEP or checkpoint folder.

    Raises:
        RunError: There is no such checkpoint, or the run's configuration names a server and belongs to another user.
        CheckpointError: The checkpoint is incomplete or damaged, or is not from a training run.
        ConfigError: A Ray job passes a relative path.
        DataError: The path is not valid, or the store cannot be reached.
    """
    place = make_absolute(str(run))
    path, query = split_query(place)
    parent, _, step = path.rpartition("/")
    if step.isdecimal() and query_file_info(place).type.name == "NotFound":
        return find_step(parent + query, int(step))
    return find(place)


def _check_states(replicas: Sequence[ReplicaConnection], about: dict[str, Any], folder: str, service: str) -> None:
    """Raise an error if the replicas do not all serve the run and step of the checkpoint.

    Raises:
        ServiceChangedError: The replicas serve different models.
        RunError: The replicas serve a run or step other than that of the checkpoint.
    """
    states = [each.state for each in replicas]
    models = [[state[key] for key in ("run", "step", "rows", "dense")] for state in states]
    if any(model != models[0] for model in models):
        versions = " and ".join(dict.fromkeys(state["version"] for state in states))
        raise ServiceChangedError(f"the replicas serve different models ({versions})")
    step = about["progress"]["step"]
    run = format_version(about["config"]["run"]["name"], step, "").rsplit("-", 2)[0]
    served_run, served_step = models[0][:2]
    if (served_run, served_step) != (run, step):
        other_run = f"pass the folder of run {served_run}, or the address of the service of run {run}"
        if served_step > step:
            other_step = f"pass RUN/{served_step}; if the run has not saved it, stop the run or wait for its end first"
        else:
            other_step = f"pass RUN/{served_step}, or repeat the command when the service serves step {step}"
        served, stored = f"step {served_step} of run {served_run}", f"step {step} of run {run}"
        what = f"the service serves {served}, but the checkpoint contains {stored}"
        raise RunError(what, where=f"{service}, {folder}", do=other_step if served_run == run else other_run)


def _compare(replicas: Sequence[ReplicaConnection], stored: StoredState, console: RunConsole) -> list[Difference]:
    """Return the differences between a checkpoint and each replica; all replicas have the same tables and weights."""
    found: dict[tuple[str, StatePart, str], Difference] = {}
    state, rows = replicas[0].state, 0
    for part, expected in stored.parts.items():
        for name in sorted(expected.keys() | state[part].keys()):
            shapes = state[part].get(name), expected.get(name)
            if None in shapes or shapes[0] != shapes[1]:
                texts = [f"{each['dtype']} {each['shape']}" if each else "missing" for each in shapes]
                text = f"{texts[0]} in the service, {texts[1]} in the checkpoint"
                found |= {(r.replica, part, name): Difference(r.replica, part, name, examples=[text]) for r in replicas}
                continue
            for first, end, values in stored.iterate_blocks(part, name):
                digest = sha256(to_bytes(values)).hexdigest()
                for each in replicas:
                    get = partial(each.get, "/state/block", part=part, name=name, first=first, end=end)
                    if get().decode() != digest:
                        key, differing = (each.replica, part, name), get(values=1)
                        difference = found.setdefault(key, Difference(*key))
                        difference.add(*stored.compare(part, name, first, values, differing))
                if part == "rows":
                    rows += len(values)
                    share = format_percent(rows / _count(state, "rows"))
                    console.phase(f"{share} of all rows compared", always=False)
    return [*found.values()]


def _count(state: dict[str, Any], part: StatePart) -> int:
    return sum(each["shape"][0] for each in state[part].values())

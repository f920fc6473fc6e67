"""Clients of the soak test, which compare each answer with the scores of its version."""

import json
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from served import to_arrow_stream
from services import TOKEN
from urllib3 import PoolManager, Retry
from urllib3.exceptions import HTTPError

from raytrec.serving.bodies import ARROW, JSON

ANY_VERSION = -1
NOTE_KINDS = ("wrong", "failed", "retried")


def make_requests(made, table):
    """Return small requests in every format: (body, content type, version → scores)."""
    found, model = [], made["whole"].model
    mine = model.get_reader("query").columns.names
    for first in range(0, len(table) - 3, 3):
        part = table.slice(first, 1 + first % 4)
        rows, user = part.to_pylist(), part.select(mine).slice(0, 1).to_pylist()[0]
        candidates = part.drop_columns(mine).to_pylist()
        asked = {"user": user, "candidates": candidates}
        for body, kind, scored in (
            (json.dumps({"rows": rows}), JSON, {"rows": part}),
            (json.dumps({"columns": part.to_pydict()}), JSON, {"rows": part}),
            (to_arrow_stream(part), ARROW, {"rows": part}),
            (json.dumps(asked), JSON, asked),
        ):
            scores = {each.version: each.model.predict(**scored).to_pydict() for each in made.values()}
            found.append((body, kind, scores))
    return found


def make_retry(attempts):
    """Return the retries of docs/serving.md."""
    statuses = [429, 500, 502, 503, 504]
    return Retry(attempts, status_forcelist=statuses, allowed_methods=None, backoff_factor=0.1, backoff_max=5)


class Clients:
    """Threads that send one request after the other and record the outcomes.

    Args:
        versions: Versions of the exports, in the order of the index in `state`.
        state: A State.
    """

    def __init__(self, url, requests, versions, state):
        self._retry = make_retry(10)
        self._url, self._requests, self._versions, self._state = f"{url}/predict", requests, versions, state
        self.counts, self.notes = Counter(), []

    def run(self, clients):
        """Run until enough requests are sent and all events are applied."""
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(self._run, range(clients)))

    def _run(self, seed):
        http, order = PoolManager(), np.random.default_rng(seed).permutation(len(self._requests))
        while self._state.take():
            body, kind, scores = self._requests[order[self._state.asked.value % len(order)]]
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
            stable, began = self._state.version(), time.time()
            try:
                answer = http.request("POST", self._url, body=body, headers=headers, retries=self._retry, timeout=60)
            except HTTPError as error:
                self._note("failed", began, repr(error))
                continue
            for tried in answer.retries.history:
                self._note("retried", began, repr(tried.status or tried.error))
            if answer.status != 200:
                self._note("failed", began, answer.data[:300].decode(errors="replace"))
                continue
            self._compare(answer.json(), scores, stable, began)

    def _compare(self, answer, scores, stable, began):
        version = answer["version"]
        self.counts[version] += 1
        place, unchanged = stable[1], stable == self._state.version()
        if unchanged and place != ANY_VERSION and version != self._versions[place]:
            self._note("wrong", began, f"{version} instead of {self._versions[place]}")
        expected = scores.get(version, {})
        right = [np.allclose(answer["predictions"][k], v, rtol=1e-6, atol=1e-6) for k, v in expected.items()]
        if not right or not all(right):
            self._note("wrong", began, f"{answer} instead of {expected}")

    def _note(self, kind, began, what):
        self.counts[kind] += 1
        self.notes.append((kind, began, time.time(), what))


class SoakState:
    """State shared by the process of the clients and the process that swaps versions."""

    def __init__(self, requests):
        self._requests = requests
        self.asked, self._going = multiprocessing.Value("q"), multiprocessing.Value("b", True)
        self._version = multiprocessing.Array("q", [0, 0])

    def take(self):
        """Count a request and return True if the request must be sent."""
        with self.asked.get_lock():
            self.asked.value += 1
            return self._going.value or self.asked.value <= self._requests

    def end(self):
        """Record that all events have been applied."""
        self._going.value = False

    def version(self):
        """Return (number of changes, index of the version that must answer; ANY_VERSION: any)."""
        with self._version.get_lock():
            return tuple(self._version)

    def change(self, place):
        """Set the index of the version that must answer from now on."""
        with self._version.get_lock():
            self._version[:] = [self._version[0] + 1, place]


def run_clients(*given, clients, results):
    """Run all clients in this process and put their counts and notes into `results`."""
    asking = Clients(*given)
    asking.run(clients)
    results.put((asking.counts, asking.notes))

"""10,000 malformed requests to `raytrec serve` with two replicas get a 4xx, and memory stays flat."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice

import numpy as np
import pytest
from malformed import (
    corrupt_body,
    malformed_arrow_bodies,
    malformed_http_requests,
    malformed_json_bodies,
    rows_with_wrong_type,
    send_raw_bytes,
)
from served import ARROW, JSON, assert_predictions_equal, to_arrow_stream
from services import TOKEN, resident_mib
from urllib3 import PoolManager

pytestmark = pytest.mark.survive
REQUESTS, WARM_UP, CLIENTS, SLOW_CLIENTS = 10_000, 2_000, 4, 8
LARGE_BODY_BYTES = 1 << 20  # larger ones go to the warm-up: the allocator keeps part of their memory
MAX_GROWTH_MIB = 32  # per process, after the warm-up


class Sender:
    """Client that sends bodies and records responses that a service must never give."""

    def __init__(self, url):
        self._http, self._url = PoolManager(maxsize=CLIENTS), f"{url}/predict"
        self.counts, self.wrong = {}, []

    def send(self, name, kind, body, token=TOKEN):
        headers = {"Content-Type": kind, "Authorization": f"Bearer {token}"}
        answer = self._http.request("POST", self._url, body=body, headers=headers, retries=False, timeout=60)
        self.counts[answer.status] = self.counts.get(answer.status, 0) + 1
        said = json.loads(answer.data)
        told = "predictions" in said if answer.status == 200 else said.get("error")
        if not told or not 200 <= answer.status < 500:
            self.wrong.append((name, answer.status, answer.data[:300], body[:300]))

    def send_all(self, bodies):
        """Send bodies from several threads."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            while several := [*islice(bodies, 100)]:  # all at once would take much memory
                [*pool.map(lambda body: self.send(*body), several)]


def iterate_malformed_bodies(rows, table, small, seed):
    """Yield an endless sequence of malformed bodies."""
    draw = np.random.default_rng(seed)
    good = [(JSON, json.dumps({"rows": rows[:2]}).encode()), (ARROW, to_arrow_stream(table.slice(0, 2)))]
    while True:
        for name, kind, body in small:
            yield name, kind, body
            yield "other values", JSON, rows_with_wrong_type(draw, rows[:3])
            for of, whole in good:
                yield "cut or changed", of, corrupt_body(draw, whole)
            yield "of another type", *good[draw.integers(2)][:1], good[draw.integers(2)][1]
        yield "another token", *good[0], "another"


class SlowClients:
    """Connections that send one byte of a request every 0.2 s."""

    def __init__(self, url, data):
        host, port = url.removeprefix("http://").split(":")
        self._connections = [socket.create_connection((host, int(port))) for _ in range(SLOW_CLIENTS)]
        self._data, self._stop = data, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        for place in range(len(self._data) - 1):
            for connection in self._connections:
                with suppress(OSError):  # the service has closed it
                    connection.send(self._data[place : place + 1])
            if self._stop.wait(0.2):
                return

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        for connection in self._connections:
            connection.close()


INVALID_PROMOTION_BODIES = [b"", b"[", b"[" * 50_000, b"[]", b'{"uri": 3}', b'{"uri": "\\u0000"}', b" " * (20 << 20)]


@pytest.mark.parametrize("body", INVALID_PROMOTION_BODIES, ids=len)
def test_promotion_without_a_valid_uri_is_refused(service, exports_and_table, body):
    answer = request_promotion(service, body, JSON)
    assert 400 <= answer.status < 500 and json.loads(answer.data)["error"], answer.data
    assert service.versions() == [exports_and_table[0]["whole"].version] * 2


def test_cross_site_promotion_is_refused(service, exports_and_table):
    answer = request_promotion(service, json.dumps({"uri": exports_and_table[0]["whole"].path}).encode(), "text/plain")
    assert answer.status == 415, answer.data


def request_promotion(service, body, kind):
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
    return PoolManager().request("POST", f"{service.url}/promote", body=body, headers=headers, retries=False)


def send_raw(url, requests):
    """Send each request twice: wait for the response, then close without reading it."""
    for name, data in requests:
        status = send_raw_bytes(url, data)
        assert status is None or status < 500, (name, status)
        send_raw_bytes(url, data, close=True)


def test_malformed_requests_get_4xx_and_memory_stays_flat(service, exports_and_table):
    exports, table = exports_and_table
    rows, model = table.to_pylist(), exports["whole"].model
    bodies, sender = malformed_json_bodies(rows[:2]) + malformed_arrow_bodies(table), Sender(service.url)
    small = [body for body in bodies if len(body[2]) < LARGE_BODY_BYTES]
    head = malformed_http_requests(json.dumps({"rows": rows}).encode())
    began = service.replicas()
    sender.send_all(iter(bodies * 3))
    send_raw(service.url, head)
    sender.send_all(islice(iterate_malformed_bodies(rows, table, small, 1), WARM_UP))
    before = [resident_mib(process) for process in began]
    with SlowClients(service.url, head[3][1]):
        send_raw(service.url, head)
        sender.send_all(islice(iterate_malformed_bodies(rows, table, small, 2), REQUESTS))
    time.sleep(1)
    after = [resident_mib(process) for process in began]
    print(sender.counts, before, after)
    assert not sender.wrong, sender.wrong[:5]
    assert {200, 400, 401, 413} <= sender.counts.keys() and sum(sender.counts.values()) > REQUESTS
    assert all(process.is_running() for process in began)
    assert all(b < a + MAX_GROWTH_MIB for a, b in zip(before, after, strict=True)), (before, after)
    assert_predictions_equal(service.ask("/predict", {"rows": rows})["predictions"], model.predict(table))

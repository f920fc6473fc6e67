"""Clients for `benchmarks/serve.py`: one process with many connections that each send requests repeatedly.

    python benchmarks/serve_client.py SIDE CLIENTS SECONDS

SIDE is a JSON object with `port`, `path`, `headers`, `bodies` (a pickled list), `pids` of the service and
`answering` (the processes that listen). Warms up for a quarter of the time, and prints the measurements as JSON.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import psutil
import uvloop

STEP = 7  # distance between the bodies of two consecutive requests of a client


class Connection(asyncio.Protocol):
    """Connection that sends each request after the previous response, until a time, and stores their seconds."""

    def __init__(self, requests: Iterator[bytes], until: float, durations: list[float]):
        self._requests, self._until, self._durations = requests, until, durations
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Send the first request."""
        self._transport = transport
        self._send()

    def _send(self, is_closing: bool = False) -> None:
        self._received, self._began = b"", perf_counter()
        if not is_closing and (self._began < self._until or not self._durations):
            return self._transport.write(next(self._requests))
        self.done.set_result(None)
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Send the next request if the response is complete."""
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)  # Ray Serve's proxy responds in chunks
        if len(body) == int(length[1]) if length else body.endswith(b"0\r\n\r\n"):
            if not head.startswith(b"HTTP/1.1 200"):
                return self._transport.abort()
            self._durations.append(perf_counter() - self._began)
            self._send(b"\r\nconnection: close" in head.lower())

    def connection_lost(self, error: Exception | None) -> None:
        """Report a connection that ended before its time."""
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"{error or 'connection ended'}: {self._received[:2000]}"))


async def run(side: dict, bodies: list[bytes], clients: int, seconds: float) -> dict[str, float]:
    """Run the clients, and return their measurements.

    Returns:
        rate: requests/s; p50 and p99: milliseconds per request; cpu_us and answering_cpu_us: CPU-µs per request of the
        service and of its listening processes; client_load: CPU seconds per second of this process.
    """
    lines = [f"POST {side['path']} HTTP/1.1", "Host: localhost", *map(": ".join, side["headers"].items())]
    head = "\r\n".join([*lines, "Content-Length: "]).encode()
    requests = [b"%b%d\r\n\r\n%b" % (head, len(body), body) for body in bodies]
    cpu_s, own_s, began = read_cpu_s(side["pids"]), process_time(), perf_counter()

    async def connect(first: int) -> None:
        own_requests = (requests[i % len(requests)] for i in count(first, STEP))
        make = partial(Connection, own_requests, began + seconds, durations)
        while not durations or perf_counter() < began + seconds:  # again if the service closes the connection
            await (await asyncio.get_running_loop().create_connection(make, "127.0.0.1", side["port"]))[1].done

    durations: list[float] = []
    await asyncio.gather(*map(connect, range(clients)))
    wall_s, own_s, after_s = perf_counter() - began, process_time() - own_s, read_cpu_s(side["pids"])
    spent_us = {pid: 1e6 * (after_s[pid] - cpu_s[pid]) / len(durations) for pid in after_s.keys() & cpu_s.keys()}
    return {
        "rate": len(durations) / wall_s,
        **{f"p{p}": 1000 * float(np.percentile(durations, p)) for p in (50, 99)},
        "cpu_us": sum(spent_us.values()),
        "answering_cpu_us": sum(spent_us.get(pid, 0) for pid in side["answering"]),
        "client_load": own_s / wall_s,
    }


def read_cpu_s(pids: list[int]) -> dict[int, float]:
    """Return pid → CPU seconds of those processes that have not ended."""
    return {p.pid: sum(p.info["cpu_times"][:2]) for p in psutil.process_iter(["cpu_times"]) if p.pid in pids}


def main() -> None:
    """Read the command line and the bodies, run the clients, and print their measurements as JSON."""
    side, clients, seconds = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    bodies = pickle.loads(Path(side["bodies"]).read_bytes())
    for length in (seconds / 4, seconds):
        figures = uvloop.run(run(side, bodies, clients, length))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

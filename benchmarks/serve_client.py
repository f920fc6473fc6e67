"""Clients for `benchmarks/serve.py`: one process with many connections that each send requests repeatedly.

    python benchmarks/serve_client.py PORT CLIENTS SECONDS TYPE BODIES

BODIES is a file with a line of sizes as JSON, followed by the bodies. Prints requests/s and milliseconds as
JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import uvloop

STEP = 7  # distance between the bodies of two consecutive requests of a client


async def ask(port: int, head: bytes, bodies: list[bytes], first: int, until: float, durations: list[float]) -> None:
    """Send requests until the time `until`, and append the seconds of each to `durations`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while perf_counter() < until:
        body = bodies[first % len(bodies)]
        first += STEP
        began = perf_counter()
        writer.write(head % len(body) + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200"):
            raise SystemExit(answer.decode())
        start = answer.find(b"content-length:")
        if start >= 0:
            await reader.readexactly(int(answer[start + 15 : answer.index(b"\r", start)]))
        else:  # Ray Serve's proxy answers in chunks
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readline()
        durations.append(perf_counter() - began)
    writer.close()


async def run(port: int, clients: int, seconds: float, kind: str, bodies: list[bytes]) -> dict[str, float]:
    """Run the clients, and return requests/s and the 50th and 99th percentiles of milliseconds."""
    head = (
        f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nAccept: {kind}\r\n"
        "Content-Length: %d\r\n\r\n"
    ).encode()
    durations: list[float] = []
    began = perf_counter()
    each = [ask(port, head, bodies, i, began + seconds, durations) for i in range(clients)]
    await asyncio.gather(*each)
    rate = len(durations) / (perf_counter() - began)
    return {"rate": rate, **{f"p{p}": 1000 * float(np.percentile(durations, p)) for p in (50, 99)}}


def main() -> None:
    """Read the command line and the bodies, run the clients, and print their figures as JSON."""
    port, clients, seconds, kind, file = sys.argv[1:]
    sizes, _, rest = Path(file).read_bytes().partition(b"\n")
    bodies, start = [], 0
    for size in json.loads(sizes):
        bodies.append(rest[start : start + size])
        start += size
    print(json.dumps(uvloop.run(run(int(port), int(clients), float(seconds), kind, bodies))))


if __name__ == "__main__":
    main()

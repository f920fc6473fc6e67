"""Services of `benchmarks/serve.py`: their processes, requests, scores and speed over HTTP."""

from __future__ import annotations

import json
import os
import pickle
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from harness import HERE, median_ratio

import raytrec
from raytrec.data.assembler import Assembler
from raytrec.serving.bodies import ARROW, JSON

ROWS, BODIES, CLIENTS, START_S, TOLERANCE = 32, 60, (1, 10, 50), 180, 1e-5
DENSE, SPARSE = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
SIDES = {  # side → service, path, form of its bodies
    "ray": ("ray", "/predict", "tensors"),
    "pydantic": ("fastapi", "/pydantic", "tensors"),
    "orjson": ("fastapi", "/orjson", "tensors"),
    "stacked": ("fastapi", "/stacked", "tensors"),
    "raytrec rows": ("raytrec", "/predict", "rows"),
    "raytrec columns": ("raytrec", "/predict", "columns"),
    "raytrec Arrow": ("raytrec", "/predict", "arrow"),
    "raytrec Arrow, 2 lists": ("raytrec", "/predict", "arrow lists"),
    "raytrec OIP, binary": ("raytrec", "/v2/models/dlrm/infer", "binary"),
}
PEERS = ("pydantic", "orjson", "stacked")
OIP_LENGTH = "Inference-Header-Content-Length"
MARK = "BENCH_SERVE_PORT"  # environment variable that marks the processes of a service
FIGURES = "requests/s", "p50 ms", "p99 ms", "CPU-µs/request", "answering process"
HEADER = ("variant", "clients", *FIGURES, *(f"× {peer}" for peer in PEERS))


def write_weights(export: str, file: str) -> None:
    """Write the weights of an exported DLRM for `serve_sides.py`: tables, float32 [26, rows, 64], and layers."""
    model = raytrec.load(export)
    count = model.manifest.data_schema.tables[SPARSE[0]].rows
    ids, zeros = pa.array(np.arange(count)), pa.array(np.zeros(count, np.float32))
    rows = model.reader.read(pa.table(dict.fromkeys(SPARSE, ids) | dict.fromkeys(DENSE, zeros)))
    tensors = Assembler(model.reader.form, model.manifest.features).assemble([rows], count)
    inputs = model.lookups(tensors, SPARSE)
    program = torch.export.load(Path(export) / model.manifest.programs["predict"].file)
    dense = [value.detach() for value in program.state_dict.values() if value.is_floating_point()]
    torch.save({"tables": torch.stack([inputs["bag", name] for name in SPARSE]), "dense": dense}, file)


@contextmanager
def run_services(export: str, weights: str, data: pa.Table) -> Iterator[dict[str, dict[str, Any]]]:
    """Run the services during the block, and return side → port, path, headers and file of bodies."""
    ports = dict(zip(("ray", "fastapi", "raytrec"), find_free_ports(3), strict=True))
    uvicorn = shlex.split("-m uvicorn serve_sides:app --loop uvloop --http httptools --no-access-log")
    words = {
        "ray": [str(HERE / "serve_sides.py"), "ray"],
        "fastapi": [*uvicorn, "--app-dir", str(HERE), "--port"],
        "raytrec": ["-m", "raytrec", "serve", export, "--no-token", "--port"],
    }
    forms = write_bodies(data)
    sides = {side: {"port": ports[each], "path": path} | forms[form] for side, (each, path, form) in SIDES.items()}
    with ExitStack() as stack:
        for service, port in ports.items():
            side = next(each for each in sides.values() if each["port"] == port)
            stack.enter_context(run_service([*words[service], str(port)], side, {"WEIGHTS": os.path.abspath(weights)}))
        yield sides


@contextmanager
def run_service(words: list[str], side: dict[str, Any], environment: dict[str, str]) -> Iterator[None]:
    """Run a service during the block, which begins when the service responds."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: str(side["port"])} | environment
        process = subprocess.Popen([sys.executable, *words], env=environment, stdout=log, stderr=log)
        try:
            until = time.monotonic() + START_S
            while not isinstance(answer := _ask(side), np.ndarray):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(words)} does not respond: {answer}\n{log.read()[-4000:]}")
                time.sleep(0.5)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            for pid in _find_processes(side["port"])["pids"]:  # did not end
                os.kill(pid, signal.SIGKILL)


def find_free_ports(count: int) -> list[int]:
    """Return unused ports below those that Linux assigns, which Ray's processes could take meanwhile."""
    used = {each.laddr.port for each in psutil.net_connections("tcp")}
    return random.sample(sorted(set(range(20_000, 32_000)) - used), count)


def write_bodies(data: pa.Table) -> dict[str, dict[str, Any]]:
    """Write the same requests in each form, and return form → headers and file."""
    by_form: dict[tuple[str, str], list[bytes]] = {}
    for place in range(BODIES):
        rows = data.slice(place * ROWS, ROWS).combine_chunks()
        dense, ids = (np.stack([rows[name].to_numpy() for name in names], 1) for names in (DENSE, SPARSE))
        tensors = {"dense": ("FP32", dense), "ids": ("INT64", ids)}
        lists = {name: pa.FixedSizeListArray.from_arrays(x.ravel(), x.shape[1]) for name, (_, x) in tensors.items()}
        inputs = [
            {"name": name, "shape": x.shape, "datatype": kind, "parameters": {"binary_data_size": x.nbytes}}
            for name, (kind, x) in tensors.items()
        ]
        head = _to_json({"inputs": inputs, "parameters": {"binary_data_output": True}})
        for form, kind, body in (
            ("tensors", JSON, _to_json({"dense": dense.tolist(), "sparse": ids.tolist()})),
            ("rows", JSON, _to_json({"rows": rows.to_pylist()})),
            ("columns", JSON, _to_json({"columns": rows.to_pydict()})),
            ("arrow", ARROW, _to_stream(rows)),
            ("arrow lists", ARROW, _to_stream(pa.table(lists))),
            ("binary", "application/octet-stream", head + dense.tobytes() + ids.tobytes()),
        ):
            by_form.setdefault((form, kind), []).append(body)
    forms = {}
    for (form, kind), bodies in by_form.items():
        Path(form).write_bytes(pickle.dumps(bodies))
        forms[form] = {"headers": {"Content-Type": kind, "Accept": kind}, "bodies": str(Path(form).absolute())}
    forms["binary"]["headers"][OIP_LENGTH] = str(len(head))  # the same for all bodies, whose shapes are equal
    return forms


def _to_json(values: Any) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def _to_stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _ask(side: dict[str, Any]) -> np.ndarray | str:
    """Return the scores of a side's first body, or the reason why there are no scores."""
    body = pickle.loads(Path(side["bodies"]).read_bytes())[0]
    request = urllib.request.Request(f"http://127.0.0.1:{side['port']}{side['path']}", body, side["headers"])
    try:
        with urllib.request.urlopen(request, timeout=START_S) as response:
            content = response.read()
            if response.headers.get_content_type() == ARROW:
                return pa.ipc.open_stream(content).read_all()["score"].to_numpy()
            if length := response.headers.get(OIP_LENGTH):
                return np.frombuffer(content[int(length) :], np.float32)
            values = json.loads(content)
            return np.array(values.get("predictions", values)["score"])
    except OSError as error:  # HTTPError has a body
        return f"{error} {getattr(error, 'read', bytes)()[:1000]}"


def check_scores(sides: dict[str, dict[str, Any]], expected: np.ndarray) -> None:
    """Raise SystemExit if a side does not return the expected scores of its first body."""
    for side, spec in sides.items():
        scores = _ask(spec)
        if isinstance(scores, str) or not np.allclose(scores, expected, rtol=0, atol=TOLERANCE):
            raise SystemExit(f"{side}, POST {spec['path']}: the scores are not those of raytrec.load: {scores}")


def measure_round(sides: dict[str, dict[str, Any]], number: int, seconds: float) -> dict[str, dict[str, dict]]:
    """Send requests to each side in turn (in reverse in odd rounds), and return side → clients → measurements."""
    figures: dict[str, dict[str, dict]] = {side: {} for side in sides}
    for clients in CLIENTS:
        for side in list(sides)[:: -1 if number % 2 else 1]:
            figures[side][str(clients)] = measure(sides[side], clients, seconds)
    return figures


def measure(side: dict[str, Any], clients: int, seconds: float) -> dict[str, float]:
    """Send a side's requests with serve_client.py, and return the measurements."""
    spec = json.dumps(side | _find_processes(side["port"]))
    words = [sys.executable, str(HERE / "serve_client.py"), spec, str(clients), str(seconds)]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=START_S).stdout)


def _find_processes(port: int) -> dict[str, list[int]]:
    """Return the ids of a service's processes (`pids`), and of the processes that listen on its port (`answering`)."""
    pids = set()  # orphans have the mark; workers of Ray, whose title overwrites the mark, have a marked ancestor
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get(MARK) == str(port):
            with suppress(psutil.Error):
                pids |= {process.pid, *(child.pid for child in process.children(recursive=True))}
    listening = {each.pid for each in psutil.net_connections("tcp") if each.laddr.port == port and not each.raddr}
    return {"pids": sorted(pids), "answering": sorted(pids & listening)}


def make_rows(rounds: list[dict]) -> list[list[str]]:
    """Return the cells of HEADER for each side and number of clients."""

    def make_cells(side: str, clients: str) -> list[str]:
        def values(figure: str, of: str = side) -> list[float]:
            return [each[of][clients][figure] for each in rounds]

        formats = {"rate": ",.0f", "p50": ".1f", "p99": ".1f", "cpu_us": ",.0f", "answering_cpu_us": ",.0f"}
        ratios = [f"{median_ratio(values('rate'), values('rate', peer)):.2f}" for peer in PEERS]
        return [side, clients, *(format(median(values(figure)), form) for figure, form in formats.items()), *ratios]

    return [make_cells(side, str(clients)) for side in rounds[0] for clients in CLIENTS]

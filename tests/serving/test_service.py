"""`raytrec serve` for real: replicas on Ray Serve, promotions under load, killed replicas, its end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from checkpoints import flip
from exports import trained
from prometheus_client.parser import text_string_to_metric_families
from test_models import Modelled

import raytrec
from raytrec.common.errors import RunError
from raytrec.serving.command import promote

TOKEN, START_S = "a token", 200
pytestmark = pytest.mark.survive


def ask(url, path, body=None, token=TOKEN):
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=30) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """({name: (folder, version, scores of the rows)}, rows)."""
    root, made = tmp_path_factory.mktemp("service"), {}
    folder, table, _, _ = trained(Modelled("two_tower", (1, 1)), root)
    for name, precision in (("whole", None), ("small", "int8"), ("half", "fp16")):
        path = raytrec.export(folder, str(root / name), quantize=precision).path
        model = raytrec.load(path)
        made[name] = path, model.manifest.version, model.predict(table).to_pydict()
    return made, table.to_pylist()


@pytest.fixture(scope="module")
def service(exports, tmp_path_factory):
    """(the process, its address)."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "raytrec", "serve", exports[0]["whole"][0], "--replicas", "2"]
    log = (tmp_path_factory.mktemp("log") / "log").open("w+")
    environment = os.environ | {"RAYTREC_SERVE_TOKEN": TOKEN}
    process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=environment)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            if len(ask(url, "/versions")) == 2:
                break
        except OSError:
            assert process.poll() is None, Path(log.name).read_text()
        time.sleep(0.2)
    else:
        pytest.fail(Path(log.name).read_text())
    yield process, url
    process.kill()


class Load:
    """Clients that ask all the time, and check every answer against its version's scores."""

    def __init__(self, url, exports, clients=4, retries=0):
        self.url, (self._made, self._rows), self._retries = url, exports, retries
        self.counts, self.failed, self._stop = Counter(), [], threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self):
        scores = {version: values for _, version, values in self._made.values()}
        while not self._stop.is_set():
            try:
                answer = self._ask()
            except OSError as error:
                self.failed.append(error)
                continue
            self.counts[answer["version"]] += 1
            for name, values in scores[answer["version"]].items():
                if not np.allclose(answer["predictions"][name], values, rtol=1e-6, atol=1e-6):
                    self.failed.append(answer)

    def _ask(self):
        for left in range(self._retries, -1, -1):
            try:
                return ask(self.url, "/predict", {"rows": self._rows})
            except OSError:
                if not left:
                    raise
                time.sleep(0.2)


def damaged(export, tmp_path, change):
    copy = Path(shutil.copytree(export, tmp_path / "copy"))
    change(copy)
    return str(copy)


def flip_a_table(copy):
    flip(sorted((copy / "tables").iterdir())[0], -10)


def change_a_score(copy):
    import hashlib

    import pyarrow as pa

    table = pa.ipc.open_file(copy / "golden.arrow").read_all()
    place = table.column_names.index("score_y")
    table = table.set_column(place, "score_y", pa.array(np.array(table["score_y"]) + np.float32(0.01)))
    with pa.ipc.new_file(str(copy / "golden.arrow"), table.schema) as writer:
        writer.write_table(table)
    content, manifest = (copy / "golden.arrow").read_bytes(), json.loads((copy / "manifest.json").read_text())
    about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"]["golden.arrow"] = about
    (copy / "manifest.json").write_text(json.dumps(manifest))


def test_promotions_under_load(service, exports, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYTREC_SERVE_TOKEN", TOKEN)
    (_, url), (made, _) = service, exports
    with Load(url, exports) as load:
        for name in ("small", "half", "whole", "small"):
            path, version, _ = made[name]
            assert promote(path, service=url, name=None) == version
            before = Counter(load.counts)
            time.sleep(0.5)
            gained = {v for v, count in load.counts.items() if count > before[v] + 4}
            assert gained == {version}, "another version answered after the promotion"
        for number, change in enumerate((flip_a_table, change_a_score)):
            bad = damaged(made["whole"][0], tmp_path / str(number), change)
            with pytest.raises(RunError, match=r"not the file that was|scores differ"):
                promote(bad, service=url, name=None)
            assert set(ask(url, "/versions").values()) == {made["small"][1]}
        assert promote(None, service=url, name=None, rollback=True) == made["whole"][1]
    assert not load.failed and len(load.counts) == 3, load.failed[:3]


def replicas_of(process):
    family = psutil.Process(process.pid).children(recursive=True)
    return [p for p in family if "ServeReplica" in " ".join(p.cmdline())]


def test_a_killed_replica(service, exports):
    process, url = service
    with Load(url, exports, retries=20) as load:
        found = replicas_of(process)
        assert len(found) == 2, [p.cmdline() for p in found]
        found[0].kill()
        time.sleep(1)
        until = time.monotonic() + 60
        while found[0].is_running() or len(replicas_of(process)) < 2:
            assert time.monotonic() < until
            time.sleep(0.2)
    assert not load.failed, load.failed[:3]
    assert set(ask(url, "/versions").values()) == {exports[0]["whole"][1]}


def coordinator_of(process):
    family = psutil.Process(process.pid).children(recursive=True)
    (found,) = [p for p in family if "ray::Coordinator" in " ".join(p.cmdline())]
    return found


def wait_until(is_so, seconds=60):
    until = time.monotonic() + seconds
    while True:
        try:
            if is_so():
                return
        except OSError:  # 503, while the coordinator is started again
            pass
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_killed_coordinator_and_then_a_replica(service, exports, monkeypatch):
    monkeypatch.setenv("RAYTREC_SERVE_TOKEN", TOKEN)
    (process, url), (made, _) = service, exports
    path, promoted, _ = made["half"]
    promote(path, service=url, name=None)
    with Load(url, exports, retries=20) as load:
        coordinator_of(process).kill()
        wait_until(lambda: len(ask(url, "/versions")) == 2)
        before = set(ask(url, "/versions"))
        replicas_of(process)[0].kill()
        wait_until(lambda: len(set(ask(url, "/versions")) - before) == 1)
        wait_until(lambda: len(ask(url, "/versions")) == 2)
        assert set(ask(url, "/versions").values()) == {promoted}
        time.sleep(1)
    assert not load.failed and set(load.counts) == {promoted}, (load.failed[:3], load.counts)
    assert promote(None, service=url, name=None, rollback=True) == made["whole"][1]
    assert set(ask(url, "/versions").values()) == {made["whole"][1]}


def metrics(url):
    """(name, replica) → a counter's value, over its other labels."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    found = Counter()
    with urllib.request.urlopen(request, timeout=30) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                found[sample.name, sample.labels.get("replica")] += sample.value
    return found


def test_every_scrape_has_all_replicas_and_no_counter_falls(service, exports):
    _, url = service
    replicas = set(ask(url, "/versions"))
    with Load(url, exports) as load:
        seen, until = metrics(url), time.monotonic() + 12
        first = seen
        while time.monotonic() < until:
            now = metrics(url)
            assert {replica for _, replica in now} == replicas | {None}
            fallen = [key for key in seen if "waiting" not in key[0] and now[key] < seen[key]]
            assert not fallen
            seen = now
            time.sleep(0.1)
    for replica in replicas:
        for name in ("raytrec_requests_total", "raytrec_seconds_count", "raytrec_batch_rows_count"):
            assert seen[name, replica] > first[name, replica]
    assert seen["raytrec_replicas", None] == 2
    wait_until(lambda: sum(shown(url)["course"]["requests_per_s"]["200"]) * 5 >= sum(load.counts.values()))
    found = shown(url)
    assert set(found["replicas"]) == replicas and found["model"]["version"] == exports[0]["whole"][1]
    assert 0 < [p for p in found["course"]["p50_s"] if p][-1] < 10


def shown(url):
    return ask(url, "/figures?minutes=15")


def test_it_listens_on_loopback_alone_and_ends_with_all_it_has_started(service):
    process, url = service
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(url, "/versions", token="another")
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    listening = [c.laddr for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    loopback = ("127.0.0.1", "::ffff:127.0.0.1", "::1")
    assert listening and all(address.ip in loopback for address in listening), listening
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    _, alive = psutil.wait_procs(family, 20)
    assert not alive

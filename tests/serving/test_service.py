"""`raytrec serve` on Ray Serve: promotions under load, killed replicas and shutdown."""

import os
import shutil
import signal
import threading
import time
import urllib.error
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from described import assert_described
from served import assert_predictions_equal
from services import TOKEN, change_golden_score, copy_export, corrupt_table, mapped_folders, run_service
from urllib3 import PoolManager
from urllib3.exceptions import NewConnectionError
from waiting import wait_for

from raytrec.cluster.local_ray import check_ports
from raytrec.common.errors import RunError
from raytrec.serving.command import promote
from raytrec.serving.coordinator import REPLICA_TIMEOUT_S
from raytrec.serving.deployment import shut_down_service
from raytrec.serving.replica_state import Challenger

pytestmark = pytest.mark.survive


@pytest.fixture(scope="module")
def exports(exports_and_table):
    """Return the exports by name and the rows."""
    made, table = exports_and_table
    return made, table.to_pylist()


class Load:
    """Clients that send requests continuously and compare each answer with its version's scores.

    Attributes:
        counts: Number of answers by version.
        failed: Errors and wrong answers as text.
    """

    def __init__(self, service, exports, clients=4, retries=0):
        self._service, (self._made, self._rows), self._retries = service, exports, retries
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
        scores = {e.version: e.model.predict(self._rows).to_pydict() for e in self._made.values()}
        while not self._stop.is_set():
            try:
                answer = self._ask()
            except OSError as error:
                self.failed.append(repr(error))
                time.sleep(0.1)
                continue
            self.counts[answer["version"]] += 1
            for name, values in scores[answer["version"]].items():
                if not np.allclose(answer["predictions"][name], values, rtol=1e-6, atol=1e-6):
                    self.failed.append(repr(answer))

    def _ask(self):
        for left in range(self._retries, -1, -1):
            try:
                return self._service.ask("/predict", {"rows": self._rows})
            except OSError:
                if not left:
                    raise
                time.sleep(0.2)


def test_answers_match_their_descriptions(service, exports):
    """Endpoints that ask the coordinator; tests/serving/test_openapi.py covers the others."""
    document, name = service.ask("/openapi.json"), exports[0]["whole"].version
    http, headers = PoolManager(), {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    for method, path in (("get", "/versions"), ("get", "/model"), ("get", "/metrics"), ("post", "/promote")):
        bodies = ["{}", '{"uri": 3}', '{"uri": "s3://elsewhere/x"}'] if method == "post" else [None]
        for body in bodies:
            answer = http.request(method.upper(), service.url + path, body=body, headers=headers, retries=False)
            assert_described(document, method, path, answer.status, answer.data, answer.headers)
        answer = http.request(method.upper(), service.url + path, retries=False)
        assert answer.status == 401
        assert_described(document, method, path, answer.status, answer.data, answer.headers)
    assert set(service.ask("/versions").values()) == {name}
    assert service.ask("/v2/models/small")["versions"] == [name]
    with_methods = {path for path, methods in document["paths"].items() if methods.keys() & {"get", "post"}}
    assert {"/versions", "/model", "/metrics", "/promote", "/v2/models/{name}/infer"} < with_methods


def test_promotions_under_load_lose_no_request(service, exports, tmp_path):
    made, _ = exports
    with Load(service, exports) as load:
        for name in ("small", "half", "whole", "small"):
            version = made[name].version
            assert promote(made[name].path, service=service.url, name=None) == version
            before = Counter(load.counts)
            time.sleep(0.5)
            gained = {v for v, count in load.counts.items() if count > before[v] + 4}
            assert gained == {version}, "another version answered after the promotion"
        for number, change in enumerate((corrupt_table, change_golden_score)):
            bad = copy_export(made["whole"].path, tmp_path / str(number), change)
            with pytest.raises(RunError, match=r"differs from the exported file|differ from the exported scores"):
                promote(bad, service=service.url, name=None)
            assert set(service.versions()) == {made["small"].version}
        assert promote(None, service=service.url, name=None, rollback=True) == made["whole"].version
    assert not load.failed and len(load.counts) == 3, load.failed[:3]


def test_replaced_exports_are_unmapped(service, exports, tmp_path):
    made, _ = exports
    for number, name in enumerate(("small", "half", "half", "whole")):
        copy = copy_export(made[name].path, tmp_path / str(number))
        promote(copy, service=service.url, name=None)
    with pytest.raises(RunError, match="differs from the exported file"):
        promote(copy_export(copy, tmp_path / "bad", corrupt_table), service=service.url, name=None)
    for replica in service.replicas():
        wait_for(lambda r=replica: mapped_folders(r, tmp_path) == ["1", "3"], "two exports", 10)
        assert not mapped_folders(replica, made["whole"].path)


def test_promotion_survives_a_killed_replica(service, exports):
    """The other replicas continue, and the replacement answers with the new version."""
    made, _ = exports
    with Load(service, exports, retries=20) as load:
        done = []
        asking = threading.Thread(target=lambda: done.append(promote_with_retries(service, made["small"].path)))
        asking.start()
        time.sleep(0.2)
        killed = service.replicas()[0]
        killed.kill()
        asking.join(60)
        assert done == [made["small"].version]
        wait_for_replacement(service, made["small"].version)
        assert not killed.is_running() and len(service.replicas()) == 2
        assert promote(made["whole"].path, service=service.url, name=None) == made["whole"].version
    assert not load.failed, load.failed[:3]


def wait_for_replacement(service, version):
    """Wait until a killed replica is no longer counted, and two replicas answer with a version."""
    time.sleep(REPLICA_TIMEOUT_S + 1)
    wait_for(lambda: service.versions() == [version] * 2, "two replicas", 90)


def promote_with_retries(service, uri):
    """Promote an export and return its version; retry if the contacted replica is killed."""
    while True:
        try:
            return promote(uri, service=service.url, name=None)
        except RunError:
            time.sleep(1)


def test_killed_coordinator_keeps_the_promotion(service, exports):
    made, _ = exports
    promote(made["small"].path, service=service.url, name=None)
    with Load(service, exports, retries=20) as load:
        service.family("ray::Coordinator")[0].kill()
        wait_for(lambda: len(service.versions()) == 2, "the coordinator")
        service.replicas()[0].kill()
        wait_for_replacement(service, made["small"].version)
    assert not load.failed and list(load.counts) == [made["small"].version], load.counts
    assert promote(made["whole"].path, service=service.url, name=None) == made["whole"].version


def truncate_all_tables(export):
    for table in Path(export, "tables").iterdir():
        os.truncate(table, 0)  # the rest of a partial page would be read as zeros


def test_service_rolls_back_if_the_served_export_is_truncated(service, exports, tmp_path):
    """The kernel kills the replicas, because the files of their mapped tables are too short."""
    made, rows = exports
    copy = copy_export(made["small"].path, tmp_path / "copy")
    promote(made["whole"].path, service=service.url, name=None)
    promote(copy, service=service.url, name=None)
    found = service.replicas()
    truncate_all_tables(copy)

    def restored():
        with suppress(OSError):
            service.ask("/predict", {"rows": rows})
        return len(service.versions()) == 2 and set(service.versions()) == {made["whole"].version}

    wait_for(restored, "the version before", 180)
    assert not any(replica.is_running() for replica in found)
    answer = service.ask("/predict", {"rows": rows})["predictions"]
    assert_predictions_equal(answer, made["whole"].model.predict(rows))
    said = f"version      rolled back to {made['whole'].version}: {copy} cannot be loaded"
    wait_for(lambda: said in (service.folder / "serve.log").read_text(), "the reason", 30)


def test_exports_outside_the_folder_cannot_be_promoted(exports, tmp_path):
    made, _ = exports
    copy = copy_export(made["small"].path, tmp_path / "copy")
    with run_service(made["whole"].path, 1, tmp_path, promote_from=None) as service:
        beside = str(Path(made["whole"].path, "..", "small"))
        assert promote(beside, service=service.url, name=None) == made["small"].version
        link = Path(made["whole"].path).with_name("link")
        link.symlink_to(copy)
        for uri in (copy, str(link), "s3://bucket/export?endpoint_override=127.0.0.1:9"):
            with pytest.raises(RunError, match="outside the folder of the service"):
                promote(uri, service=service.url, name=None)
        assert promote(None, service=service.url, name=None, rollback=True) == made["whole"].version
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0


def assert_keys_get_versions(service, exports, challenger):
    """Assert that all replicas choose the version of a key alike; return the number of answers by version."""
    (made, rows), counts = exports, Counter()
    scores = {each.version: each.model.predict(rows) for each in made.values()}
    for key in (f"user-{number}" for number in range(40)):
        version = challenger.version if challenger.includes(key.encode()) else made["whole"].version
        for _ in range(4):  # on connections to several replicas
            answer = service.ask("/predict", {"rows": rows}, **{"X-Request-Key": key})
            assert answer["version"] == version
            counts[version] += 1
            assert_predictions_equal(answer["predictions"], scores[version])
    return counts


def replace_replica(service, version):
    service.replicas()[0].kill()
    wait_for_replacement(service, version)


def test_challenger_is_kept_by_restarted_processes_until_a_rollback(service, exports, tmp_path, capsys):
    made, rows = exports
    whole, small = made["whole"], made["small"]
    promote(whole.path, service=service.url, name=None)
    copy = copy_export(small.path, tmp_path / "copy")
    assert promote(copy, service=service.url, name=None, share=0.3) == whole.version
    assert f"{small.version} ({copy}) is the challenger: canary, share 0.3" in capsys.readouterr().out
    challenger = Challenger(copy, small.version, 0.3, "canary")
    counts = assert_keys_get_versions(service, exports, challenger)
    assert min(counts[whole.version], counts[small.version]) > 0
    for uri, share, words in ((whole.path, 0.5, "is already the current version"), (copy, 2, "invalid share")):
        with pytest.raises(RunError, match=words):
            promote(uri, service=service.url, name=None, share=share)
    service.family("ray::Coordinator")[0].kill()
    wait_for(lambda: len(service.versions()) == 2, "the coordinator")
    replace_replica(service, whole.version)
    assert_keys_get_versions(service, exports, challenger)
    assert service.ask("/model")["challenger"] == vars(challenger) | {"failed_replicas": []}
    with pytest.raises(RunError, match="no export in this folder"):
        promote(str(tmp_path / "nothing"), service=service.url, name=None, share=0.1)
    assert service.ask("/model")["challenger"]["share"] == 0.3

    shutil.rmtree(copy)
    replace_replica(service, whole.version)
    find_failed = lambda: service.ask("/model")["challenger"]["failed_replicas"]  # noqa: E731
    wait_for(lambda: len(find_failed()) == 1, "a replica without the challenger", 60)
    assert all(service.ask("/predict", {"rows": rows})["version"] in (whole.version, small.version) for _ in range(20))
    assert promote(None, service=service.url, name=None, rollback=True) == whole.version
    assert f"{whole.version} ({whole.path}) serves all requests" in capsys.readouterr().out
    assert {service.ask("/predict", {"rows": rows})["version"] for _ in range(20)} == {whole.version}
    assert service.ask("/model")["challenger"] is None
    for replica in service.replicas():
        wait_for(lambda r=replica: not mapped_folders(r, tmp_path), "the removal of the challenger", 20)


def scrape_metrics(service):
    """Return (name, replica) → value, summed over the other labels."""
    found = Counter()
    for sample in service.samples():
        found[sample.name, sample.labels.get("replica")] += sample.value
    return found


def test_metrics_cover_all_replicas_and_counters_never_fall(service, exports):
    time.sleep(REPLICA_TIMEOUT_S + 1)  # until killed replicas are no longer counted
    wait_for(lambda: len(service.versions()) == 2, "two replicas")
    replicas = set(service.ask("/versions"))
    with Load(service, exports):
        seen, until = scrape_metrics(service), time.monotonic() + 12
        first = seen
        while time.monotonic() < until:
            now = scrape_metrics(service)
            assert {replica for _, replica in now} == replicas | {None}
            fallen = [key for key in seen if "waiting" not in key[0] and now[key] < seen[key]]
            assert not fallen
            seen = now
            time.sleep(0.1)
    for replica in replicas:
        for name in ("raytrec_requests_total", "raytrec_seconds_count", "raytrec_batch_rows_count"):
            assert seen[name, replica] > first[name, replica]
    assert seen["raytrec_replicas", None] == 2
    found = service.ask("/model")
    assert set(found["replicas"]) == replicas and "before" in found
    assert found["model"]["version"] == exports[0]["whole"].version


def test_service_listens_on_loopback_and_stops_its_processes(service):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        service.ask("/versions", token="another")
    family = [psutil.Process(service.process.pid), *service.family()]
    listening = [c.laddr for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    loopback = ("127.0.0.1", "::ffff:127.0.0.1", "::1")
    assert listening and all(address.ip in loopback for address in listening), listening
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(60) == 0
    _, alive = psutil.wait_procs(family, 20)
    assert not alive


def test_shutdown_resets_no_request_and_frees_the_port(exports, tmp_path):
    """Half of the clients keep their connections open. A refused connection is not an error."""
    made, rows = exports
    http, wrong, answered, stop = PoolManager(maxsize=4), [], Counter(), threading.Event()

    def run(service, closing):
        headers = {"Authorization": f"Bearer {TOKEN}"} | ({"Connection": "close"} if closing else {})
        options = {"json": {"rows": rows}, "headers": headers, "retries": False}
        while not stop.is_set():
            try:
                answer = http.request("POST", f"{service.url}/predict", **options)
                answered[answer.status] += 1
            except NewConnectionError:
                return
            except Exception as error:
                wrong.append(error)

    with run_service(made["whole"].path, 2, tmp_path) as service:
        with ThreadPoolExecutor(4) as pool:
            for closing in (False, True, False, True):
                pool.submit(run, service, closing)
            time.sleep(1)
            service.process.send_signal(signal.SIGTERM)
            status = service.process.wait(60)
            stop.set()
        assert status == 0
        assert not wrong and answered[200] > 20, (answered, wrong[:3])
        check_ports({"--port": int(service.url.rpartition(":")[2])})


def test_load_starts_a_second_replica(exports, tmp_path):
    with run_service(exports[0]["whole"].path, "1:2", tmp_path) as service, Load(service, exports, 16) as load:
        wait_for(lambda: len(service.versions()) == 2, "a second replica", 180)
    assert not load.failed, load.failed[:3]


def test_end_of_a_service_keeps_other_applications(ray_cluster):
    """Two applications without replicas of raytrec; Serve is shut down with the second one."""
    import ray
    from ray import serve
    from ray.serve.config import ProxyLocation

    class Idle:
        pass

    def list_serve_actors():
        return [each for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == "serve"]

    serve.start(proxy_location=ProxyLocation.Disabled)
    try:
        for name in ("films", "other"):
            serve.run(serve.deployment(Idle, ray_actor_options={"num_cpus": 0}).bind(), name=name, route_prefix=None)
        shut_down_service("films")
        assert {name: each.status for name, each in serve.status().applications.items()} == {"other": "RUNNING"}
        assert list_serve_actors()
        shut_down_service("other")
        assert not list_serve_actors()
    finally:
        serve.shutdown()

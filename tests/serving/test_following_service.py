"""`raytrec serve --follow` on Ray Serve: replicas follow a run's deltas, and catch up after they were killed."""

import json
import signal
import urllib.error

import pytest
from deltas import DeltaFolder, train_steps
from described import assert_described
from served import assert_predictions_equal
from services import TOKEN, run_service
from test_models import ModelCase
from urllib3 import PoolManager
from waiting import wait_for

import raytrec
from raytrec.verification.verify import verify

pytestmark = pytest.mark.survive


@pytest.mark.parametrize("options", [[], ["--table-shards", "2", "--table-timeout-ms", "20000"]])
def test_replicas_follow_a_run_and_catch_up_after_a_kill(tmp_path, options):
    steps = train_steps(ModelCase("dlrm", (1, 1)), tmp_path, 4)
    folder = DeltaFolder.of_schema(tmp_path / "deltas", steps.schema)
    folder.write_steps(steps, 1, 2)
    folder.add_export(1, steps.export(1, tmp_path / "first"))
    rows = json.loads(json.dumps(steps.table.to_pylist()))
    with run_service(str(folder.path), 2, tmp_path, promote_from=None, options=["--follow", *options]) as service:

        def wait_for_step(step):
            version = f"small-{step}-{folder.checksums[step][:8]}"
            wait_for(lambda: service.versions() == [version] * 2, version, 120)

        wait_for_step(2)
        with pytest.raises(urllib.error.HTTPError) as refused:
            service.ask("/promote", {"uri": str(tmp_path / "first")})
        assert refused.value.code == 409
        assert json.loads(refused.value.read())["error"].endswith("the service follows the deltas of a run")
        folder.write_steps(steps, 3, 3)
        wait_for_step(3)
        killed = service.replicas()[0]
        for process in [killed, *service.family("ray::TableShard")[:1]]:
            process.send_signal(signal.SIGKILL)
        folder.write_steps(steps, 4, 4)
        wait_for(lambda: killed.pid not in [each.pid for each in service.replicas()], "the end of a replica", 60)
        wait_for_step(4)
        expected = raytrec.load(steps.export(4, tmp_path / "fourth")).predict(steps.table)
        for _ in range(8):  # connections of both replicas
            answer = wait_for(lambda: ask_unless_unavailable(service, rows), "an answer", 60)
            assert answer["version"].startswith("small-4-")
            assert_predictions_equal(answer["predictions"], expected)
        metrics = verify(service.url, steps.folders[3]).metrics
        assert (metrics["result"], len(metrics["replicas"])) == ("equal", 2) and metrics["rows"] > 50
        document, headers = service.ask("/openapi.json"), {"Authorization": f"Bearer {TOKEN}"}
        for path in ("/ready", "/model"):
            answer = PoolManager().request("GET", service.url + path, headers=headers)
            assert_described(document, "get", path, answer.status, answer.data, answer.headers)
            assert json.loads(answer.data)["freshness"].items() >= {"step": 4, "delta": 4, "problem": None}.items()
        metrics = PoolManager().request("GET", service.url + "/metrics", headers=headers).data.decode()
        assert metrics.count("raytrec_serve_step{") == 2


def ask_unless_unavailable(service, rows):
    """Return an answer, or None while a replica connects to a new shard."""
    try:
        return service.ask("/predict", {"rows": rows})
    except urllib.error.HTTPError as error:
        assert error.code == 503

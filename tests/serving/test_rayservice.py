"""The Serve configuration in deploy/kuberay/rayservice.yaml, submitted as KubeRay does."""

import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from heads import RayHead, find_free_ports
from services import TOKEN, RunningService
from test_service import Load, exports  # noqa: F401
from waiting import wait_for

from raytrec.skew.compare import skew

pytestmark = [pytest.mark.survive, pytest.mark.timeout(900)]
SPEC = yaml.safe_load((Path(__file__).parents[2] / "deploy/kuberay/rayservice.yaml").read_text())["spec"]
START_TIMEOUT_S = 240


class DeployedService:
    """Serve application deployed on a Ray head from the modified configuration."""

    def __init__(self, head):
        (self.port,), self._head = find_free_ports(1), head
        self.service = RunningService(None, f"http://127.0.0.1:{self.port}")

    def apply(self, **args):
        config = yaml.safe_load(SPEC["serveConfigV2"])
        config["applications"][0]["args"] |= {"host": "127.0.0.1", "port": self.port} | args
        self._ask("PUT", json.dumps(config).encode())

    def status(self):
        """Return the status and message of the application."""
        found = json.loads(self._ask("GET"))["applications"]["raytrec"]
        return found["status"], found["message"]

    def _ask(self, method, body=None):
        headers = {"Authorization": f"Bearer {self._head.token.read_text()}", "Content-Type": "application/json"}
        address = f"{self._head.url}/api/serve/applications/"
        with urllib.request.urlopen(urllib.request.Request(address, body, headers, method=method)) as answer:
            return answer.read()

    def answers_with(self, version):
        found = set(self.service.versions())
        assert found or self.status()[0] != "DEPLOY_FAILED", self.status()
        return found == {version}


@pytest.fixture
def head(tmp_path):
    """Start a Ray head with the environment variables of the pods in rayservice.yaml."""
    (container,) = SPEC["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value", TOKEN) for each in container["env"]}
    del environment["RAYTREC_ROOT"]
    with RayHead(tmp_path / "h", cpus=5, environment=environment) as head:
        yield head


def test_rayservice_configuration_serves_promotes_and_logs(head, exports, tmp_path):  # noqa: F811
    made, rows = exports
    whole, small, deployed = made["whole"], made["small"], DeployedService(head)
    log = {"log_requests": str(tmp_path / "requests"), "log_sample": 1.0}
    deployed.apply(uri=whole.path, **log)
    wait_for(lambda: deployed.answers_with(whole.version), "the service", START_TIMEOUT_S)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        deployed.service.ask("/predict", {"rows": rows}, token="another")
    with Load(deployed.service, exports, retries=20, clients=1) as load:
        deployed.apply(uri=small.path, **log)
        wait_for(lambda: deployed.answers_with(small.version), "the other version", START_TIMEOUT_S)
        deployed.apply(uri=str(tmp_path / "nothing"), **log)
        wait_for(lambda: deployed.status()[0] == "DEPLOY_FAILED", "the refusal", START_TIMEOUT_S)
        assert "there is no export in this folder" in deployed.status()[1]
        time.sleep(1)
    assert not load.failed and set(load.counts) == {whole.version, small.version}, load.failed[:3]
    assert deployed.service.ask("/predict", {"rows": rows})["version"] == small.version
    deployed._ask("DELETE")
    wait_for(lambda: not json.loads(deployed._ask("GET"))["applications"], "the end of the replicas", START_TIMEOUT_S)
    for export in (whole, small):
        found = skew(str(tmp_path / "requests"), export.path).metrics
        assert found["rows"] >= len(rows) and not found["differs"], export.version

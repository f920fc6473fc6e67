"""deploy/kuberay/rayservice.yaml: its configuration of Serve on a local Ray, as KubeRay gives it to Serve."""

import os
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import pytest
import yaml
from heads import free_ports
from test_service import START_S, TOKEN, Load, ask, exports  # noqa: F401

from raytrec.serving.skew import skew

pytestmark = pytest.mark.survive
FILE = Path(__file__).parents[2] / "deploy/kuberay/rayservice.yaml"
# Deploys each file that standard input names, as `serve run` does; ends with standard input.
DEPLOY = """
import sys
from click.testing import CliRunner
from raytrec.cluster.session import ray_session
with ray_session(None, 5):
    from ray import serve
    from ray.serve.scripts import cli
    for line in sys.stdin:
        done = CliRunner().invoke(cli, ["run", "--non-blocking", line.strip()])
        print(done.output, done.exception, flush=True)
    serve.shutdown()
"""


class Deployed:
    """A local Ray, and the file's configuration with changes."""

    def __init__(self, folder):
        (self.port,), self.folder = free_ports(1), folder
        self.url, self.log = f"http://127.0.0.1:{self.port}", folder / "log"
        # The head's environment in the file has the token and Serve's switches.
        head = yaml.safe_load(FILE.read_text())["spec"]["rayClusterConfig"]["headGroupSpec"]
        env = {e["name"]: e.get("value", TOKEN) for e in head["template"]["spec"]["containers"][0]["env"]}
        del env["RAYTREC_ROOT"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", DEPLOY],
            stdin=subprocess.PIPE,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            text=True,
        )

    def apply(self, **args):
        config = yaml.safe_load(yaml.safe_load(FILE.read_text())["spec"]["serveConfigV2"])
        config["http_options"] = {"host": "127.0.0.1", "port": self.port}
        config["applications"][0]["args"] |= args
        file = self.folder / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        self._process.stdin.write(f"{file}\n")
        self._process.stdin.flush()

    def wait(self, reached):
        until = time.monotonic() + 2 * START_S
        while time.monotonic() < until:
            try:
                if reached():
                    return
            except OSError:
                assert self._process.poll() is None, self.log.read_text()
            time.sleep(0.3)
        pytest.fail(self.log.read_text())

    def close(self):
        self._process.stdin.close()
        self._process.wait(2 * START_S)


@pytest.fixture
def deployed(tmp_path):
    deployed = Deployed(tmp_path)
    yield deployed
    deployed.close()


@pytest.mark.timeout(900)
def test_its_configuration_serves_promotes_and_logs(deployed, exports, tmp_path):  # noqa: F811
    made, rows = exports
    whole, small = made["whole"], made["small"]
    log = {"log_requests": str(tmp_path / "requests"), "log_sample": 1.0}
    deployed.apply(uri=whole[0], **log)
    deployed.wait(lambda: set(ask(deployed.url, "/versions").values()) == {whole[1]})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(deployed.url, "/predict", {"rows": rows}, token="another")
    with Load(deployed.url, exports, retries=20, clients=1) as load:
        deployed.apply(uri=small[0], **log)
        deployed.wait(lambda: set(ask(deployed.url, "/versions").values()) == {small[1]})
        deployed.apply(uri=str(tmp_path / "nothing"), **log)
        deployed.wait(lambda: "there is no export here" in deployed.log.read_text())
        time.sleep(1)
    assert not load.failed and set(load.counts) == {whole[1], small[1]}, load.failed[:3]
    assert ask(deployed.url, "/predict", {"rows": rows})["version"] == small[1]
    deployed.close()
    for path, version, _ in (whole, small):
        found = skew(str(tmp_path / "requests"), path).metrics
        assert found["rows"] >= len(rows) and not found["differs"], version

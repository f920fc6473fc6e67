"""Test the sources of the images without an engine: linters, compose specification, security settings.

test_clean_root.py builds and runs the images.
"""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from compose_spec import PyCompose

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
SERVICES = ("head", "worker", "mlflow", "notebook")


class Loader(yaml.SafeLoader):
    """YAML with the two tags that Compose knows."""


Loader.add_constructor("!reset", lambda loader, node: None)


def test_the_dockerfile_passes_hadolint():
    lint("hadolint", "--failure-threshold", "style", DEPLOY / "Dockerfile")


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_pass_shellcheck_and_are_executable(script: Path):
    lint("shellcheck", script)
    assert script.stat().st_mode & stat.S_IXOTH


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_meet_the_specification(name: str):
    PyCompose.from_yaml(yaml.safe_dump(values(name))).validate()


@pytest.mark.parametrize("name", SERVICES)
def test_compose_services_have_minimal_privileges(name: str):
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not {"privileged", "cap_add", "devices", "network_mode", "pid", "ipc", "user"} & set(service)
    assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}
    assert not any("docker.sock" in str(volume) for volume in service["volumes"])


def test_compose_publishes_ports_only_on_loopback():
    ports = [str(port) for service in services().values() for port in service.get("ports", [])]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)
    networks = values("compose.yaml")["networks"]
    assert networks["cluster"] == {"internal": True}
    assert services()["worker"]["networks"] == ["cluster"]


def test_compose_passes_tokens_as_files_not_variables():
    for secret in values("compose.yaml")["secrets"].values():
        assert secret["file"].startswith("./secrets/")
    for name in SERVICES:
        variables = services()[name].get("environment", {})
        assert not [key for key in variables if "TOKEN" in key or "PASSWORD" in key]


def test_dockerignore_excludes_data_and_secrets():
    ignore = (REPOSITORY / ".dockerignore").read_text().splitlines()
    patterns = [line for line in ignore if line and not line.startswith("#")]
    assert patterns[0] == "*"  # exclude everything by default
    back = {line.removeprefix("!").partition("/")[0] for line in patterns if line.startswith("!")}
    assert back.isdisjoint({"data", "runs", ".git", ".venv", "shared", "tests"})
    assert "!deploy" not in patterns  # deploy/ contains secrets/


def test_init_creates_private_tokens_once(tmp_path: Path):
    script = tmp_path / "init.sh"
    script.write_text((DEPLOY / "init.sh").read_text())
    subprocess.run(["sh", script], check=True)
    tokens = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert tokens.keys() == {"ray_token", "jupyter_token"}
    assert len(set(tokens.values())) == 2
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    assert all(len(token) == 64 and token.isalnum() for token in tokens.values())
    for path in (tmp_path / "secrets").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_uid != 0
    subprocess.run(["sh", script], check=True)
    assert tokens == {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}


@pytest.mark.parametrize("role", ["head", "worker", "notebook"])
@pytest.mark.parametrize("token", [None, "", "short"])
def test_no_role_starts_without_a_token(role: str, token: str | None, tmp_path: Path):
    file = tmp_path / "token"
    if token is not None:
        file.write_text(token)
    environment = {
        "PATH": "/usr/bin:/bin",  # neither ray nor jupyter
        "RAY_AUTH_TOKEN_PATH": str(file),
        "JUPYTER_TOKEN_FILE": str(file),
    }
    script = DEPLOY / "role.sh"
    done = subprocess.run(["sh", script, role], env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert str(file) in done.stderr
    assert "expected:" in done.stderr


def lint(program: str, *arguments: str | Path) -> None:
    command = [Path(sys.executable).with_name(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def values(name: str) -> dict:
    """Load a compose file with its anchors resolved."""
    return yaml.load((DEPLOY / name).read_text(), Loader)


def services() -> dict[str, dict]:
    return values("compose.yaml")["services"]

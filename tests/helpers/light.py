"""Notebook environment (requirements/notebook.txt), without torch, torchrec, fbgemm and MLflow."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
NOTEBOOK_VENV = REPO / ".venv-notebook"  # kept between runs because creating it takes a minute
NOTEBOOK_REQUIREMENTS = REPO / "requirements" / "notebook.txt"
ANSWER_PREFIX = "ANSWER "
PROGRAM_PREAMBLE = """
import json, os, sys, time
from raytrec import Cluster
from raytrec.common.errors import RaytrecError, RunError

def answer(**values):
    print("ANSWER " + json.dumps(values), flush=True)
"""


def notebook_python() -> str:
    """Return the Python of the notebook environment; create it if missing or outdated."""
    program, made = NOTEBOOK_VENV / "bin" / "python", NOTEBOOK_VENV / "made-of"
    digest = hashlib.sha256(NOTEBOOK_REQUIREMENTS.read_bytes()).hexdigest()
    if not made.is_file() or made.read_text() != digest:
        pip = [str(program), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(NOTEBOOK_VENV)], check=True, timeout=120)
        subprocess.run([*pip, "-r", str(NOTEBOOK_REQUIREMENTS)], check=True, timeout=900)
        subprocess.run([*pip, "--no-build-isolation", "-e", str(REPO)], check=True, timeout=300)
        made.write_text(digest)
    return str(program)


def start_notebook_program(
    code: str, env: dict[str, str], *arguments: str, cwd: Path | None = None
) -> subprocess.Popen:
    """Start a program in the notebook environment in the background."""
    return subprocess.Popen(
        [notebook_python(), "-c", PROGRAM_PREAMBLE + code, *arguments],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_notebook_program(
    code: str, env: dict[str, str], *arguments: str, timeout: float = 400, cwd: Path | None = None
) -> dict:
    """Run a program in the notebook environment; return its answer with stderr under the key "stderr"."""
    process = start_notebook_program(code, env, *arguments, cwd=cwd)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
        process.wait()
    answers = [line for line in out.splitlines() if line.startswith(ANSWER_PREFIX)]
    assert process.returncode == 0 and answers, f"exit code {process.returncode}\n{out}\n{err[-8000:]}"
    return json.loads(answers[-1].removeprefix(ANSWER_PREFIX)) | {"stderr": err}

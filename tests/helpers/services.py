"""`raytrec serve` as a process: started, asked, its replicas, exports that it is to refuse."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from checkpoints import flip
from exports import trained
from test_models import Modelled
from waiting import wait_for

import raytrec

TOKEN, START_S = "a token", 300
PRECISIONS = {"whole": None, "small": "int8", "half": "fp16"}


@dataclass(frozen=True)
class Export:
    """An export of one trained model.

    Attributes:
        model: of `raytrec.load`.
    """

    path: str
    version: str
    model: object


def exports_of_a_model(root):
    """({name: Export}, rows as a table): one trained model, its tables in three precisions."""
    folder, table, _, _ = trained(Modelled("two_tower", (1, 1)), root)
    made = {}
    for name, precision in PRECISIONS.items():
        path = raytrec.export(folder, str(root / name), quantize=precision).path
        model = raytrec.load(path)
        made[name] = Export(path, model.manifest.version, model)
    return made, table.select(made["whole"].model.columns.names)


@dataclass(frozen=True)
class Running:
    """A service that has been started; `folder` has its log."""

    process: subprocess.Popen
    url: str
    folder: Path | None = None

    def ask(self, path, body=None, token=TOKEN):
        """What it answers; raises OSError where that is an error."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def versions(self):
        """Those that replicas answer with; empty while the service does not answer."""
        try:
            return list(self.ask("/versions").values())
        except OSError:
            return []

    def replicas(self):
        """The processes that answer."""
        return self.family("ServeReplica")

    def family(self, name=""):
        """Its processes that are called so."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if name in called(process)]


def called(process):
    """A process's command; empty when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def running(export, replicas, folder, promote_from="/"):
    """`raytrec serve`, until the block ends.

    Args:
        replicas: how many, or as MIN:MAX.
        folder: where its log goes.
        promote_from: folder of the exports that can be promoted.
    """
    least = int(str(replicas).partition(":")[0])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "raytrec", "serve", export, "--replicas", str(replicas)]
    command += ["--promote-from", promote_from] if promote_from else []
    environment = os.environ | {"RAYTREC_SERVE_TOKEN": TOKEN}
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=environment)
    service = Running(process, f"http://127.0.0.1:{port}", folder)

    def answers():
        assert process.poll() is None, (folder / "serve.log").read_text()
        return len(service.versions()) == least

    try:
        wait_for(answers, "the service", START_S)
        yield service
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                process.kill()


def copied(export, folder, change=lambda copy: None):
    """A copy of an export, changed; its path."""
    copy = Path(shutil.copytree(export, folder))
    change(copy)
    return str(copy)


def flip_a_table(copy):
    """One byte of a table is another."""
    flip(sorted((copy / "tables").iterdir())[0], -10)


def change_a_score(copy):
    """The golden rows' scores are others, and the manifest has their checksum."""
    table = pa.ipc.open_file(copy / "golden.arrow").read_all()
    place = table.column_names.index("score_y")
    table = table.set_column(place, "score_y", pa.array(np.array(table["score_y"]) + np.float32(0.01)))
    with pa.ipc.new_file(str(copy / "golden.arrow"), table.schema) as writer:
        writer.write_table(table)
    content, manifest = (copy / "golden.arrow").read_bytes(), json.loads((copy / "manifest.json").read_text())
    about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"]["golden.arrow"] = about
    (copy / "manifest.json").write_text(json.dumps(manifest))


def resident_mib(process):
    """Memory of a process's own: not that of files it has mapped, which the system can take back."""
    memory = process.memory_info()
    return round((memory.rss - memory.shared) / 2**20, 1)


def mapped_folders(process, root):
    """Folders under `root` with files that a process has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    files = [line.split(maxsplit=5)[-1].removesuffix(" (deleted)") for line in lines if str(root) in line]
    return sorted({str(Path(file).relative_to(root).parts[0]) for file in files})

"""`raytrec serve` as a process, with requests to it, its replicas, and corrupt exports."""

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
from unittest.mock import patch

import numpy as np
import psutil
import pyarrow as pa
from checkpoints import flip_lowest_bit
from exports import train_for_export
from prometheus_client.parser import text_string_to_metric_families
from test_models import ModelCase
from waiting import wait_for

import raytrec

TOKEN, START_S = "a token", 300
TABLE_PRECISIONS = {"whole": None, "small": "int8", "half": "fp16"}


@dataclass(frozen=True)
class ExportedModel:
    """Export of a trained model.

    Attributes:
        model: result of `raytrec.load`.
    """

    path: str
    version: str
    model: object


def export_in_all_precisions(root):
    """Export one trained model with three table precisions; return ({name: Export}, rows as a table)."""
    folder, table, _, _ = train_for_export(ModelCase("two_tower", (1, 1)), root)
    made = {}
    for name, precision in TABLE_PRECISIONS.items():
        path = raytrec.export(folder, str(root / name), quantize=precision).path
        model = raytrec.load(path)
        made[name] = ExportedModel(path, model.manifest.version, model)
    return made, table.select(made["whole"].model.columns.names)


@dataclass(frozen=True)
class RunningService:
    """Running service process; `folder` has the log."""

    process: subprocess.Popen
    url: str
    folder: Path | None = None

    def ask(self, path, body=None, token=TOKEN, **more_headers):
        """Send a request and return the JSON answer. Raise OSError if the status is an error."""
        return json.loads(self._read(path, body, token, more_headers))

    def _read(self, path, body=None, token=TOKEN, more_headers=()):
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"} | dict(more_headers)
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def samples(self):
        """Return all samples of /metrics."""
        families = text_string_to_metric_families(self._read("/metrics").decode())
        return [sample for family in families for sample in family.samples]

    def versions(self):
        """Return the model versions of the replicas; empty if the service does not answer."""
        try:
            return list(self.ask("/versions").values())
        except OSError:
            return []

    def replicas(self):
        """Return the replica processes."""
        return self.family("ServeReplica")

    def family(self, name=""):
        """Return the descendant processes whose command line contains `name`."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if name in command_line(process)]


def command_line(process):
    """Return the command line of a process; empty if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def run_service(export, replicas, folder, promote_from="/", options=()):
    """Run `raytrec serve` until the block ends, in which RAYTREC_SERVE_TOKEN is its token.

    Args:
        export: path of the export.
        replicas: number of replicas, or MIN:MAX.
        folder: folder of the log.
        promote_from: folder of exports that can be promoted.
        options: more options of the command.
    """
    least = int(str(replicas).partition(":")[0])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "raytrec", "serve", export, "--replicas", str(replicas), *options]
    command += ["--promote-from", promote_from] if promote_from else []
    with patch.dict(os.environ, {"RAYTREC_SERVE_TOKEN": TOKEN}):
        with (folder / "serve.log").open("w") as log:
            process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
        service = RunningService(process, f"http://127.0.0.1:{port}", folder)

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


def copy_export(export, folder, change=lambda copy: None):
    """Copy an export, apply `change` to the copy, and return its path."""
    copy = Path(shutil.copytree(export, folder))
    change(copy)
    return str(copy)


def corrupt_table(copy):
    """Flip a bit of a table file."""
    flip_lowest_bit(sorted((copy / "tables").iterdir())[0], -10)


def change_golden_score(copy):
    """Change the scores of the golden rows."""
    table = pa.ipc.open_file(copy / "golden.arrow").read_all()
    place = table.column_names.index("score_y")
    replace_golden_rows(
        copy, table.set_column(place, "score_y", pa.array(np.array(table["score_y"]) + np.float32(0.01)))
    )


def rename_dense_column(copy, old, new):
    """Rename a dense column of an export."""
    manifest = json.loads((copy / "manifest.json").read_text())
    dense = manifest["schema"]["dense"]
    dense[dense.index(old)] = new
    (copy / "manifest.json").write_text(json.dumps(manifest))
    table = pa.ipc.open_file(copy / "golden.arrow").read_all()
    replace_golden_rows(copy, table.rename_columns([new if name == old else name for name in table.column_names]))


def replace_golden_rows(copy, table):
    """Replace the golden rows and their checksum in the manifest."""
    with pa.ipc.new_file(str(copy / "golden.arrow"), table.schema) as writer:
        writer.write_table(table)
    content, manifest = (copy / "golden.arrow").read_bytes(), json.loads((copy / "manifest.json").read_text())
    about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"]["golden.arrow"] = about
    (copy / "manifest.json").write_text(json.dumps(manifest))


def resident_mib(process):
    """Return the resident memory of a process without shared and file-mapped pages, in MiB."""
    memory = process.memory_info()
    return round((memory.rss - memory.shared) / 2**20, 1)


def mapped_folders(process, root):
    """Return the folders under `root` with files that a process has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    files = [line.split(maxsplit=5)[-1].removesuffix(" (deleted)") for line in lines if str(root) in line]
    return sorted({str(Path(file).relative_to(root).parts[0]) for file in files})

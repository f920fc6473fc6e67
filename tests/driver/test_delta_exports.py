"""Exports of full models for services that follow a run's deltas."""

import sys
from subprocess import Popen
from time import sleep

import parquet
import pytest

from raytrec.common.messages import Saved
from raytrec.config.run_config import load_config
from raytrec.driver import delta_exports
from raytrec.driver.delta_exports import DeltaExports

ERROR = (
    "warning: slow\\nerror: the folder already contains an export\\n  where:    x\\n  do:       choose another --out"
)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (ERROR, "the folder already contains an export"),
        ("a\\nKilled", "exit code 1; last output: Killed"),
        ("", "exit code 1; last output: none"),
    ],
)
def test_failed_export_is_reported_with_its_cause(tmp_path, monkeypatch, output, reason):
    code = f"import sys; sys.exit('{output}' or 1)"
    monkeypatch.setattr(
        delta_exports,
        "start_command",
        lambda arguments, environment, **streams: Popen([sys.executable, "-c", code], **streams),
    )
    values = parquet.config_values(tmp_path, tmp_path / "run", export__deltas={"to": f"{tmp_path}/deltas"})
    (tmp_path / "run").mkdir()
    config = load_config(values | {"run": values["run"] | {"name": "run"}})
    warnings, folder = [], tmp_path / "run/checkpoints/step-0000000001"
    folder.mkdir(parents=True)
    exports = DeltaExports(config, warnings.append)
    exports.add(Saved(step=1, folder=str(folder), delta=1, error=None, blocked_s=0.0, seconds=0.0))
    exports.poll()
    exports.finish(lambda text, always: sleep(0.05))
    assert warnings == [f"step 1 was not exported for services that follow the run: {reason}"]

"""Run folder of an interrupted run: records, a driver record and a complete checkpoint."""

import contextlib
import json
import warnings

import checkpoints
import parquet
import recorded
import torch
import torch.distributed.checkpoint as dcp

from raytrec.checkpoint.storage import ShardWriter
from raytrec.config.run_config import load_config
from raytrec.data.files.file_identity import fingerprint, identify_datasets
from raytrec.driver.datasets import open_data

STEP = 3
TENSORS = {"tables/user/weight": (40, 8), "tables/tag/weight": (12, 8), "dense/weight": (3,)}


def make_settings(run, data):
    """Return the configuration of the run."""
    return parquet.config_values(data, run, run__name="recorded", tracking__enabled=False)


def make_run_folder(run, data):
    """Write the run folder."""
    recorded.write_recorded_run(run)
    (run / "result.json").unlink()  # the run was interrupted
    config = load_config(make_settings(run, data))
    (run / "config.yaml").write_text(config.to_yaml())
    schema, datasets = open_data(config)
    (run / "schema.yaml").write_text(schema.to_yaml())
    note = {"pid": 1, "started": 1, "host": "elsewhere", "job": None, "unix_s": 1.8e9}
    (run / "driver.json").write_text(json.dumps(note | {"status": "STOPPED", "error": None}))
    about = {
        "name": "recorded",
        "saved_unix_s": 1.8e9,
        "progress": checkpoints.progress_values(STEP, window={"rows": 0.0}),
        "evaluation": None,
        "data": fingerprint(identify_datasets(datasets)["train"]),
        "config": config.model_dump(by_alias=True, mode="json"),
        "schema": schema.to_yaml(),
        "plan": [],
        "world_size": 2,
        "versions": {"torch": torch.__version__},
    }
    place = run / f"checkpoints/step-{STEP:010d}"
    place.mkdir(parents=True)
    with warnings.catch_warnings(), contextlib.suppress(UserWarning):
        warnings.simplefilter("ignore")
        dcp.save(make_tensors(), storage_writer=ShardWriter(str(place), "a", about), no_dist=True)


def make_tensors():
    """Return the tensors of the checkpoint."""
    return {name: torch.ones(shape) for name, shape in TENSORS.items()}

"""Number of epochs chosen by train.epochs: auto."""

import pytest

from raytrec.config.run_config import RunConfig
from raytrec.worker.loop import count_total_steps, resolve_epochs


@pytest.mark.parametrize(
    "rows,epochs",
    [
        (50_000_000, 1),
        (400_000, 2),  # aim for a million rows
        (80_000, 10),  # at most 10
        (5_120, 10),
        (1_000, 50),  # at least 100 steps
        (100, 100),
    ],
)
def test_auto_epochs_depend_on_row_count(rows, epochs):
    data = {"train": "unused", "global_batch_size": 512}
    values = {"data": data, "model": {"name": "dlrm"}, "train": {"epochs": "auto"}}
    config = RunConfig.model_validate(values)
    assert resolve_epochs(config, rows) == epochs
    assert count_total_steps(config, rows) == epochs * -(-rows // 512)

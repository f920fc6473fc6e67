"""Test that Parquet footers reveal dense columns with large values before training starts."""

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from raytrec.config.run_config import load_config
from raytrec.driver.preflight import check_plan
from raytrec.driver.prepare import open_run

CLIP = {"do": "clip", "columns": ["price"], "high": 10}


@pytest.mark.parametrize(
    ("largest", "scale", "transforms", "warns"),
    [
        (100_000, {}, [], True),
        (-100_000, {}, [], True),
        (1000, {}, [], False),
        (100_000, {"price": {"log": True}}, [], False),
        (100_000, {}, [CLIP], False),
    ],
)
def test_unscaled_column_with_large_values_warns(tmp_path, largest, scale, transforms, warns):
    folder = parquet.write_dataset(tmp_path / "d", train=60, valid=20, test=20)
    path = sorted((folder / "train").glob("*.parquet"))[0]
    table = pq.read_table(path)
    prices = pa.array([0.5] * (len(table) - 1) + [largest], pa.float64())
    table = table.set_column(table.schema.get_field_index("price"), "price", prices)
    pq.write_table(table, path, row_group_size=7)
    schema = yaml.safe_load((folder / "schema.yaml").read_text())
    (folder / "schema.yaml").write_text(yaml.safe_dump(schema | {"scale": scale}))
    values = parquet.config_values(folder, tmp_path / "run", data__transforms=transforms)
    lines = check_plan(open_run(load_config(values), resumed=False))
    found = [line for line in lines if "dense column price has absolute values up to 100,000" in line]
    assert len(found) == warns
    assert all("{price: {log: true}}" in line and "{do: log, columns: [price]}" in line for line in found)

"""Plans of sequence models: DLRMv4's job, skewed tables, and work for sequences of mean length."""

from pathlib import Path

import pytest

from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.planning.dense_work import count_dense_layers
from raytrec.planning.plan_report import find_skewed_tables
from raytrec.worker.build import build_unsharded

JOBS = Path(__file__).parents[2] / "jobs"


def test_dlrm_v4_has_the_published_sizes_and_names_its_skewed_tables():
    config, schema = load_config(JOBS / "dlrm_v4.yaml"), Schema.load(JOBS / "schemas/dlrm_v4.yaml")
    config.model.check(schema)
    assert config.model.candidate_members(schema) == {"item_id", "artist_id", "album_id"}
    assert len(schema.tables) == 11
    assert sum(table.rows * table.dim * 4 for table in schema.tables.values()) == pytest.approx(600e9, rel=0.001)
    assert find_skewed_tables(schema, 32) == pytest.approx({"artist_id": 1.31, "album_id": 2.8}, abs=0.01)
    assert find_skewed_tables(schema, 4) == {}


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["fp32", "bf16"])
def test_work_grows_with_the_mean_length_of_sequences(matmul):
    read = {"table": "item", "pooling": "sequence"}

    def count(length):
        statistics = {"mean_length": length, "p99_length": 64, "max_length": 64, "distinct": 100}
        values = {
            "labels": ["y"],
            "sparse": {"item": {"table": "item"}, "history": read},
            "tables": {"item": {"rows": 100, "dim": 8}},
            "statistics": {"history": statistics} if length else {},
        }
        model = {"name": "hstu_rank", "max_length": 64, "dim": 8, "encoder": 8, "blocks": 1, "tower_mlp": [4]}
        config = load_config({"data": {"train": "unused"}, "model": model, "train": {"matmul": matmul}})
        return count_dense_layers(build_unsharded, config, Schema.parse(values, "test"), 16).flops

    short, mean, most = count(None), count(32.4), count(64)
    assert short < mean / 4
    assert 1.8 * mean < most  # attention grows faster, layers and candidates slower than lengths
    assert count(200) == most

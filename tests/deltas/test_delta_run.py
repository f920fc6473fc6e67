"""A run writes full exports next to its deltas; an export and the deltas after it lead to the trained model."""

from pathlib import Path

import parquet
import pytest
from test_apply import assert_equal_models
from test_publish import create_stream

import raytrec
from raytrec.common.errors import ConfigError
from raytrec.deltas.chain import iterate_exports
from raytrec.driver import run as driver
from raytrec.exporting.apply_deltas import apply_deltas
from raytrec.serving.follow import Follower

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.survive]


def train(data, place, deltas, **changes):
    values = parquet.config_values(data, place, train__epochs=6, checkpoint__every_steps=8, **changes)
    return driver.train(values, {"export.deltas": deltas})


@pytest.fixture(scope="module")
def followed(tiny_data, tmp_path_factory):
    """Return (result of a run, folder of its deltas)."""
    place = tmp_path_factory.mktemp("followed")
    deltas = {"to": f"{place}/deltas", "every_s": 0.1, "full_every": 2, "keep": 2}
    return train(tiny_data, place / "run", deltas), place / "deltas"


def test_exports_with_deltas_equal_the_last_checkpoint(followed, tmp_path):
    run, folder = followed
    expected = raytrec.load(raytrec.export(run.path, str(tmp_path / "last")).path)
    exports = list(iterate_exports(str(folder)))
    assert len(exports) == len(list((folder / "exports").iterdir())) in (1, 2)
    oldest = min(path.stem for path in (folder / "deltas").glob("*.json"))
    assert oldest == Path(exports[-1][0]).name, "older deltas exist"
    for place, (uri, _) in enumerate(exports):
        out = apply_deltas(uri, str(folder), str(tmp_path / f"out{place}"))
        offline = raytrec.load(out.path, check_tables=True)
        assert_equal_models(offline, expected)
        assert offline.manifest.source.step == expected.manifest.source.step == run.metrics["train.steps"]
    follower = Follower(str(folder))
    assert_equal_models(follower.versions.current.scorer, expected)
    assert follower.position.manifest.last and follower.problem is None


def test_run_that_failed_before_its_first_delta_can_be_repeated(tmp_path):
    for _ in range(2):
        create_stream(tmp_path)
        (tmp_path / "run/deltas.json").unlink()  # as a new run does in the folder of an earlier one


def test_folder_of_another_run_is_refused(followed, tiny_data, tmp_path):
    before = sorted(Path(followed[1]).rglob("*"))
    with pytest.raises(ConfigError, match="the deltas of run"):
        train(tiny_data, tmp_path / "run", {"to": str(followed[1])})
    assert sorted(Path(followed[1]).rglob("*")) == before
    with pytest.raises(ConfigError, match="a separate folder"):
        train(tiny_data, tmp_path / "run", {"to": str(tmp_path / "run")})

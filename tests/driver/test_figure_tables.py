"""Test that results render as HTML tables in notebooks, and that names and texts are escaped."""

from pathlib import Path

import raytrec
from raytrec.driver.console import Result
from raytrec.prediction import predict
from raytrec.retrieval import build


def test_result_renders_as_html_table_with_locations():
    metrics = {"name": "<b>films</b>", "train.rows": 12000, "seconds": 25.3, "world_size": 2}
    shown = Result(metrics, Path("runs/films"), ["run folder   runs/films"])._repr_html_()
    assert "<tr><td>rows trained</td><td>12,000</td></tr>" in shown and "<td>25.3</td>" in shown
    assert "<b>&lt;b&gt;films&lt;/b&gt;</b>" in shown and shown.endswith("<pre>run folder   runs/films</pre>")


def test_predictions_and_index_render_as_html_tables():
    counts = {"rows": 5000, "files": 2, "rows_per_s": None, "ids": 9, "changed_ids": 3}
    counts |= {"skipped_rows": 0, "skipped_files": 1}
    metrics = {"name": "films on data", "seconds": 2.0} | {f"predict.{name}": n for name, n in counts.items()}
    shown = Result(metrics, "out", pairs=predict._pairs(metrics))._repr_html_()
    for cells in ("rows</td><td>5,000", "ids clamped or hashed</td><td>3 of 9", "skipped files</td><td>1"):
        assert f"<tr><td>{cells}</td></tr>" in shown
    assert "skipped rows" not in shown
    metrics = {"name": "films", "seconds": 2.0, "index.items": 40, "index.width": 8, "index.faiss": None}
    metrics["index.recall@10"] = 0.98
    shown = Result(metrics, "films", pairs=build._summarize(metrics))._repr_html_()
    assert "recall of the exact top 10</td><td>0.9800" in shown and "none (exact search)" in shown


def test_package_dir_lists_public_names():
    assert {*raytrec.__all__, "__version__"} <= {*dir(raytrec)}
    for name in raytrec.__all__:
        assert hasattr(raytrec, name)

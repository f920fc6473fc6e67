"""Spans of scores as files: columns, nulls, assembled parts and unreadable input."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import DataError, RunError
from raytrec.data.fragments import Dataset, RowGroup
from raytrec.prediction.folder import Counts, Manifest, PredictionFolder, PredictionTask
from raytrec.prediction.inputs import CarriedColumns, cut_spans
from raytrec.prediction.worker import REPEAT_ADVICE, SpanWriter, group_by_file, join_parts, to_score_column


@pytest.fixture
def task(tmp_path):
    """Return a task with two files, one of 2 spans and one of 1 span."""
    (tmp_path / "in" / "b").mkdir(parents=True)
    for name, rows, group in (("a", 60, 20), ("b/c", 7, 7)):
        table = pa.table({"id": range(rows), "city": [f"city {i % 3}" for i in range(rows)]})
        pq.write_table(table, tmp_path / "in" / f"{name}.parquet", row_group_size=group)
    files = {str(tmp_path / "in" / f"{name}.parquet"): rows for name, rows in (("a", 60), ("b/c", 7))}
    names, scores = ["city", "id"], ["score_buys", "score_kind"]
    about = {"run": "r", "checkpoint": "c", "checkpoint_id": "1", "data": "in", "input": "2", "rules": {}}
    manifest = Manifest(scores=scores, columns=names, **about)
    out, below = str(tmp_path / "out"), str(tmp_path / "in")
    return PredictionTask(out, below, files, CarriedColumns(tuple(names)), manifest, 4, 40)


def cut_task_spans(task):
    sizes = {path: 20 if rows == 60 else 7 for path, rows in task.files.items()}
    groups = (RowGroup(path, group, size) for path, size in sizes.items() for group in range(task.files[path] // size))
    return cut_spans(Dataset("in", tuple(groups), None), task.batch_rows, task.span_rows)


def write_spans(task, spans, skip=False, absent=()):
    writer = SpanWriter(task, skip)
    for span in spans:
        rows = np.arange(span.first, span.first + span.rows, dtype=np.float32)
        present = ~np.isin(rows, absent)
        kinds = np.stack([rows, -rows, 0 * rows], 1)
        counts = Counts(span.rows, int((~present).sum()), {"user": [1, span.rows]})
        writer.put(span, [rows / 100, kinds], present, counts)
    writer.close()


def test_files_contain_all_rows_with_scores_of_every_task(task):
    spans = cut_task_spans(task)
    assert [(span.first, span.rows) for span in spans] == [(0, 40), (40, 20), (0, 7)]
    assert [span.is_whole for span in spans] == [False, False, True]
    write_spans(task, reversed(spans), absent=(5, 41))
    folder = PredictionFolder(task.out)
    assert sorted(folder.list_names()) == [*sorted(map(task.part_of, spans[:2])), "b/c.parquet"]
    (mine,) = group_by_file(spans).values()
    join_parts(task, mine)
    found = pq.ParquetFile(f"{task.out}/a.parquet")
    table = found.read()
    assert [found.metadata.row_group(i).num_rows for i in range(2)] == [40, 20]
    assert table.column_names == ["city", "id", "score_buys", "score_kind"]
    assert table["id"].to_pylist() == list(range(60)) and table["city"][4].as_py() == "city 1"
    for name in ("score_buys", "score_kind"):
        assert [i for i, score in enumerate(table[name].to_pylist()) if score is None] == [5, 41]
    assert table["score_kind"].type == pa.list_(pa.float32())
    assert table["score_kind"][42].as_py() == [42, -42, 0]
    complete = folder.find_finished(task, folder.list_names())
    first, second = task.files
    assert complete[first] == Counts(60, 2, {"user": [2, 60]}) and complete[second].skipped == 1
    again = f"{task.out}/again.parquet"
    pq.write_table(table.slice(1), again)
    assert Counts.from_footer(pq.read_metadata(again), task.manifest.binding) is None
    assert Counts.from_footer(found.metadata, "others") is None


def test_unreadable_columns_are_null_if_rows_are_skipped(task):
    whole = cut_task_spans(task)[2:]
    changed = pa.table({"id": range(3), "city": ["x"] * 3})
    for path in list(task.files)[1:]:
        pq.write_table(changed, path)
    with pytest.raises(DataError, match="previously had 7 or more"):
        write_spans(task, whole)
    write_spans(task, whole, skip=True)
    table = pq.read_table(f"{task.out}/b/c.parquet")
    assert table["id"].null_count == 7 and table["score_buys"].null_count == 0


def test_assemble_refuses_changed_parts(task):
    spans = cut_task_spans(task)[:2]
    write_spans(task, spans)
    pq.write_table(pa.table({"id": range(20)}), f"{task.out}/{task.part_of(spans[1])}")
    with pytest.raises(RunError, match="is damaged or has changed"):
        join_parts(task, spans)
    assert not (PredictionFolder(task.out).list_names() & {"a.parquet"})


@pytest.mark.parametrize("damage", ["page", "footer"])
def test_join_of_damaged_parts_gives_possible_advice(task, damage):
    spans = cut_task_spans(task)[:2]
    write_spans(task, spans)
    part = Path(task.out, task.part_of(spans[1]))
    content = bytearray(part.read_bytes())
    content[len(content) // 3 if damage == "page" else -6] ^= 0xFF
    part.write_bytes(content)
    with pytest.raises(RunError, match="an intermediate file of predictions cannot be read") as error:
        join_parts(task, spans)
    assert str(part) in error.value.where and error.value.do == REPEAT_ADVICE


def test_score_column_is_null_only_for_absent_rows():
    scores = np.array([0.5, np.nan], np.float32)
    assert to_score_column(scores, np.array([True, True])).null_count == 0, "a NaN score became null"
    assert to_score_column(scores, np.array([True, False])).to_pylist() == [0.5, None]

"""Golden rows: rows of the data with the scores of the model that was trained, which an export must have."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from raytrec.data.arrow import select_schema
from raytrec.data.fragments import Dataset, read_footer
from raytrec.data.order import Part
from raytrec.data.rows import decode_columns
from raytrec.exporting.onnx_model import ComparedProgram
from raytrec.exporting.tables import rounding
from raytrec.exporting.trained import Trained
from raytrec.prediction.one_process import outputs_of, read_batch
from raytrec.prediction.predict import score_names
from raytrec.scoring.lookups import PRECISIONS
from raytrec.scoring.manifest import Manifest, PrecisionName, ProgramName
from raytrec.scoring.rows import wide
from raytrec.scoring.scorer import Scorer


def golden_rows_of(dataset: Dataset, count: int) -> tuple[pa.Table, list[Part]]:
    """(the dataset's first rows as files have them, where they are): at least their types."""
    columns, parts = dataset.form.columns, []
    for group in dataset.groups:
        rows = min(count - sum(part.rows for part in parts), group.rows)
        if rows > 0:
            parts.append(Part(group.path, group.index, 0, rows))
    tables = [decode_columns(p.path, p.group, p.first, p.rows, columns, dataset.form.folders) for p in parts]
    footers = {group.path: read_footer(group.path) for group in dataset.groups}
    form = dataset.form
    held = [name for name in columns if name not in form.from_folders]
    schemas = [select_schema(each.schema.to_arrow_schema(), held) for each in footers.values()]
    schemas.append(pa.schema([(name, form.types[name]) for name in columns if name not in held]))
    kinds = pa.unify_schemas(
        [pa.schema([(f.name, wide(f.type)) for f in each]) for each in schemas], promote_options="permissive"
    )
    kinds = pa.schema([kinds.field(name) for name in columns])
    return pa.concat_tables([kinds.empty_table(), *(table.cast(kinds) for table in tables)]), parts


def golden_scores(
    trained: Trained, dataset: Dataset, parts: list[Part], precision: PrecisionName
) -> dict[str, pa.Array]:
    """The scores of rows by the trainer's model, whose tables have the rows that are written."""
    names = score_names(trained.objective.tasks)
    kinds = [pa.float32() if t.outputs == 1 else pa.list_(pa.float32()) for t in trained.objective.tasks]
    if not parts:
        return {name: pa.array([], kind) for name, kind in zip(names, kinds, strict=True)}
    batch = read_batch(trained.config, trained.whole_schema, dataset, parts)
    logits = outputs_of(
        trained.config,
        trained.whole_schema,
        trained.folder,
        trained.index,
        batch,
        as_stored=rounding(PRECISIONS[precision]),
    )
    found = trained.objective.predictions(logits).values()
    return {
        name: pa.array(list(values.numpy()), kind)
        for name, kind, values in zip(names, kinds, found, strict=True)
    }


def check_golden(
    trained: Trained,
    manifest: Manifest,
    golden: pa.Table,
    precision: PrecisionName,
    onnx: ComparedProgram | None,
) -> None:
    """Scores the golden rows by the programs, before anything is written.

    Args:
        onnx: takes the place of the program `predict`.

    Raises:
        RunError: the scores differ, or ONNX's do.
    """
    scores = {task.column for task in manifest.tasks}
    columns = pa.schema([field for field in golden.schema if field.name not in scores])
    programs: dict[ProgramName, Any] = {
        name: program.exported.module() for name, program in trained.programs.items()
    }
    if onnx:
        onnx.try_made_up_rows()
        programs["predict"] = onnx
    with trained.lookups(precision) as lookups:
        Scorer(manifest, programs, lookups, columns, golden).check()

"""Compare an export with its run: scores of golden rows, and metrics with quantized tables.

The comparison runs in one process, without Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isnan
from typing import Any

import pyarrow as pa
import torch

from raytrec.common.errors import DataError, get_first_line
from raytrec.common.formatting import format_percent
from raytrec.data.arrow import select_schema
from raytrec.data.assembler import AssembledTensors, Bags
from raytrec.data.batch import Batch
from raytrec.data.fragments import Dataset, read_footer
from raytrec.data.item_reader import read_item
from raytrec.data.order import LaneItem, Order, Part
from raytrec.data.pages.decode import ReadErrorPolicy, decode_columns
from raytrec.data.stream import Stream
from raytrec.driver.console import RunConsole
from raytrec.driver.datasets import check_usable_rows, open_dataset
from raytrec.exporting.programs import ComparedProgram
from raytrec.exporting.trained_model import TrainedModel, make_rounding
from raytrec.metrics.selection import Selection
from raytrec.prediction.one_process import compute_outputs, read_batch
from raytrec.prediction.predict import list_score_columns, list_score_types
from raytrec.scoring.lookups import Lookups
from raytrec.scoring.manifest import Manifest, Metrics, PrecisionName, ProgramName
from raytrec.scoring.request_rows import widen_type
from raytrec.scoring.scorer import Scorer
from raytrec.scoring.stored_tables import PRECISIONS
from raytrec.tasks.outputs import StepOutputs
from raytrec.worker.evaluate import evaluate


def select_golden_rows(dataset: Dataset, count: int) -> tuple[pa.Table, list[Part]]:
    """Return the first `count` rows of a dataset as stored in its files, and their locations in the files.

    Types are widened so that the rows of all files fit. The columns have their types even if there are no rows.

    Raises:
        DataError: A column has incompatible types in different files, or a row cannot be read.
    """
    form, parts = dataset.form, []
    for group in dataset.groups:
        rows = min(count - sum(part.rows for part in parts), group.rows)
        if rows > 0:
            parts.append(Part(group.path, group.index, 0, rows))
    tables = [decode_columns(p.path, p.group, p.first, p.rows, form.columns, form.folders) for p in parts]
    file_columns = [name for name in form.columns if name not in form.from_folders]
    paths = dict.fromkeys(group.path for group in dataset.groups)
    schemas = [select_schema(read_footer(path).schema.to_arrow_schema(), file_columns) for path in paths]
    schemas.append(pa.schema([(name, form.types[name]) for name in form.columns if name not in file_columns]))
    widened = [pa.schema([(f.name, widen_type(f.type)) for f in each]) for each in schemas]
    try:
        kinds = pa.unify_schemas(widened, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:  # such as text in a file, and floats in another
        what, do = f"columns have different types: {get_first_line(error)}", "write files of one type, or set --data"
        raise DataError(what, where=dataset.uri, expected="columns of one type in all files", do=do) from None
    kinds = pa.schema([kinds.field(name) for name in form.columns])
    return pa.concat_tables([kinds.empty_table(), *(table.cast(kinds) for table in tables)]), parts


def score_golden_rows(
    trained: TrainedModel, dataset: Dataset, parts: list[Part], precision: PrecisionName
) -> dict[str, pa.Array]:
    """Return score column → the trained model's scores of the rows in `parts`, with tables rounded to a precision.

    Raises:
        DataError: A row cannot be read or violates the schema.
        ConfigError: A value that is looked up is too large for the precision.
        CheckpointError: The checkpoint cannot be read or is damaged.
    """
    names, kinds = list_score_columns(trained.objective.tasks), list_score_types(trained.objective.tasks)
    if not parts:
        return {name: pa.array([], kind) for name, kind in zip(names, kinds, strict=True)}
    batch = read_batch(trained.saved, dataset, parts)
    logits = compute_outputs(trained.saved, batch, as_stored=make_rounding(PRECISIONS[precision]))
    predictions = trained.objective.predictions(logits).values()
    return {
        name: pa.array(list(values.numpy()), kind) for name, kind, values in zip(names, kinds, predictions, strict=True)
    }


def check_golden(
    trained: TrainedModel, manifest: Manifest, golden: pa.Table, precision: PrecisionName, onnx: ComparedProgram | None
) -> None:
    """Check the scores that the programs compute for the golden rows, before any file is written.

    Args:
        trained: Trained model to export.
        manifest: Manifest of the export.
        golden: Golden rows with their scores.
        precision: Precision of the tables.
        onnx: Program `predict`, which compares its scores with those of onnxruntime; None: there is no ONNX model.

    Raises:
        RunError: The scores of a program differ from the golden scores, or from the scores of onnxruntime.
    """
    programs: dict[ProgramName, Any] = {name: program.exported.module() for name, program in trained.programs.items()}
    if onnx:
        onnx.compare_random_rows()
        programs["predict"] = onnx
    with trained.lookups(precision) as lookups:
        Scorer(manifest, programs, lookups, golden).check()


def compare_precisions(
    trained: TrainedModel, places: str | list[str], precision: PrecisionName, console: RunConsole
) -> Metrics:
    """Return the metrics of the run's tasks on all rows of a dataset, with fp32 and quantized tables.

    Metrics of eval.retrieval and eval.slices are not computed. Data is read in batches of data.global_batch_size rows.
    For each batch, only the table rows that the batch looks up are read from the checkpoint.

    Args:
        trained: Trained model to export.
        places: Folders or files of the data.
        precision: Precision of the quantized tables.
        console: Console for progress and warnings.

    Returns:
        Metric → precision → value (None if undefined). If columns that the metrics require, such as labels, are
        missing, or no task can use any row, the result is empty and a warning is printed.

    Raises:
        DataError: A row contains a value that the schema does not allow, and data.on_error is not skip.
    """
    eval_config = trained.saved.config.eval.model_copy(update={"retrieval": None, "slices": []})
    config = trained.saved.config.model_copy(update={"eval": eval_config})
    try:
        dataset = open_dataset(config, trained.schema, places, "--data")
        check_usable_rows(dataset)
    except DataError as error:  # golden rows have been scored before, so only values of the tasks can be missing
        console.warn(f"metrics with fp32 and {precision} tables are not compared: {error.what} ({error.where})")
        return {}
    selection = Selection(trained.objective.tasks, eval_config)
    stream = LocalStream(
        dataset,
        Order.evaluation(config.data.global_batch_size, lanes=1),
        rank=0,
        world=1,
        faults=ReadErrorPolicy(skip=config.data.on_error == "skip"),
        features=trained.features,
    )
    metrics: Metrics = {figure.key: {} for figure in selection.figures}
    precisions: list[PrecisionName] = ["fp32", precision]
    for name in precisions:

        def report(rows: int, name: str = name) -> None:
            console.phase(f"evaluating {name} tables: {format_percent(rows / dataset.rows)} of rows", always=False)

        with trained.lookups(name, checked=False) as lookups:  # the export has just read and verified all rows
            figures, _ = evaluate(_EvaluationModel(trained, lookups, report), stream, torch.device("cpu"), selection)
        for key, values in metrics.items():
            value = figures.get(key)
            values[name] = None if value is None or isnan(value) else float(value)
    return metrics


class LocalStream(Stream):
    """Stream that reads its rows in this process, without Ray."""

    def _tables(self, items: list[LaneItem]) -> Iterator[pa.Table]:
        for item in items:
            yield read_item(item, self.dataset.form, self.faults)


class _EvaluationModel:
    """Replacement for worker.step.Step that evaluates batches with lookups of an export.

    Args:
        trained: Trained model to export.
        lookups: Lookups in tables of one precision.
        report: Function called with the number of evaluated rows after each batch.
    """

    def __init__(self, trained: TrainedModel, lookups: Lookups, report: Callable[[int], None]):
        self._trained, self._lookups, self._report = trained, lookups, report

    def evaluate(self, batches: Iterator[Batch]) -> Iterator[StepOutputs]:
        """Yield the outputs of each batch, computed without gradients."""
        trained, rows = self._trained, 0
        program = trained.programs["predict"]
        with torch.no_grad():
            for batch in batches:
                inputs = self._lookups(_to_assembled(batch), trained.schema.sparse)
                logits = program.model.logits([inputs[each.kind, each.feature] for each in program.inputs])
                yield trained.objective.outputs(logits.new_zeros(()), logits, batch)
                rows += batch.global_rows
                self._report(rows)


def _to_assembled(batch: Batch) -> AssembledTensors:
    """Return the tensors of a batch in the form that Lookups accepts."""
    ids = batch.sparse
    bags = Bags(ids.keys(), ids.values(), ids.weights_or_none(), ids.lengths(), ids.length_per_key(), ids.stride())
    return AssembledTensors(batch.dense, bags, batch.labels, batch.weights, None, None, None, None, batch.side_features)

"""A run's metrics before and after its tables are quantized, in one process, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isnan

import pyarrow as pa
import torch

from raytrec.common.errors import DataError
from raytrec.common.formatting import percent
from raytrec.data.assemble import Assembled, Bags
from raytrec.data.batch import Batch
from raytrec.data.decode import Faults
from raytrec.data.order import Item, Order
from raytrec.data.rows import read_item
from raytrec.data.stream import Stream
from raytrec.driver.console import RunConsole
from raytrec.driver.datasets import check_rows_count, open_dataset
from raytrec.exporting.trained import Trained
from raytrec.metrics.selection import Selection
from raytrec.scoring.lookups import Lookups
from raytrec.scoring.manifest import Metrics, PrecisionName
from raytrec.tasks.outputs import Outputs
from raytrec.worker.evaluate import evaluate


def compare_precisions(
    trained: Trained, places: str | list[str], precision: PrecisionName, console: RunConsole
) -> Metrics:
    """The metrics of the run's tasks over all rows of some data, with tables of fp32 and of a precision.

    Rows are read in global batches, and tables from the checkpoint, a batch's rows at a time.

    Returns:
        Nothing, and a warning, where the data lacks what metrics need, such as labels.

    Raises:
        DataError: a row that the schema does not allow.
    """
    of_tasks = trained.config.eval.model_copy(update={"retrieval": None, "slices": []})
    config = trained.config.model_copy(update={"eval": of_tasks})
    try:
        dataset = open_dataset(config, trained.schema, places, "--data")
        check_rows_count(dataset)
    except DataError as error:  # the features have been found there before
        console.warn(f"metrics are not compared: {error.what} ({error.where})")
        return {}
    selection = Selection(trained.objective.tasks, of_tasks)
    stream = LocalStream(
        dataset,
        Order.evaluation(config.data.global_batch_size, lanes=1),
        rank=0,
        world=1,
        faults=Faults(skip=config.data.on_error == "skip"),
        features=trained.features,
    )
    found: Metrics = {figure.key: {} for figure in selection.figures}
    precisions: list[PrecisionName] = ["fp32", precision]
    for each in precisions:

        def tell(rows: int, each: str = each) -> None:
            console.phase(f"metrics with {each} tables: {percent(rows / dataset.rows)} of rows", always=False)

        with trained.lookups(each, checked=False) as lookups:  # the export has just read all
            figures, _ = evaluate(_Model(trained, lookups, tell), stream, torch.device("cpu"), selection)
        for key, values in found.items():
            value = figures.get(key)
            values[each] = None if value is None or isnan(value) else float(value)
    return found


class LocalStream(Stream):
    """A stream that this process reads, without Ray."""

    def _tables(self, items: list[Item]) -> Iterator[pa.Table]:
        for item in items:
            yield read_item(item, self.dataset.form, self.faults)


class _Model:
    """What an evaluation needs of a Step.

    Args:
        tell: is called with the number of rows that have been evaluated.
    """

    def __init__(self, trained: Trained, lookups: Lookups, tell: Callable[[int], None]):
        self._trained, self._lookups, self._tell = trained, lookups, tell

    def evaluate(self, batches: Iterator[Batch]) -> Iterator[Outputs]:
        """Forward only, over all batches."""
        trained, rows = self._trained, 0
        program = trained.programs["predict"]
        with torch.no_grad():
            for batch in batches:
                found = self._lookups(_assembled(batch), trained.schema.sparse)
                logits = program.model.logits([found[each.kind, each.feature] for each in program.inputs])
                yield trained.objective.outputs(logits.new_zeros(()), logits, batch)
                rows += batch.global_rows
                self._tell(rows)


def _assembled(batch: Batch) -> Assembled:
    """A batch as lookups take it."""
    ids = batch.sparse
    counts = ids.length_per_key()
    bags = Bags(ids.keys(), ids.values(), ids.weights_or_none(), ids.lengths(), counts, ids.stride())
    labels = batch.labels, batch.weights
    return Assembled(batch.dense, bags, *labels, None, None, None, None, batch.side_features)

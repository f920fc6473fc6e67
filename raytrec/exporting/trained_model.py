"""Trained model to export, with its programs, the content of its table files and its manifest entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from raytrec import __version__
from raytrec.checkpoint.restore import read_id_rows
from raytrec.checkpoint.rows import StoredTable
from raytrec.common.storage import split_query
from raytrec.config.features import Features, resolve_features
from raytrec.config.schema import Schema
from raytrec.config.tasks import TowerName
from raytrec.driver.evaluation import Checkpoint
from raytrec.exporting.programs import Program, make_program
from raytrec.models.recommender import Recommender
from raytrec.prediction.one_process import load_model
from raytrec.prediction.predict import list_score_columns
from raytrec.scoring.lookups import Lookups
from raytrec.scoring.manifest import ExportSource, PrecisionName, ProgramName, StackEntry, TaskEntry, list_inputs
from raytrec.scoring.stored_tables import PRECISIONS, StackedTable, TablePrecision, choose_block_rows, make_header
from raytrec.tasks.objective import Objective

PIECE_BYTES = 32 << 20  # maximum size in bytes of the table rows that are in memory at a time


@dataclass(frozen=True)
class TrainedModel:
    """Trained model of a checkpoint, with its exported programs.

    Attributes:
        saved: Checkpoint with the run's configuration and schema. Side features that no program reads are omitted.
        schema: Schema restricted to the features that the programs read, and to the tables of these features.
        recommender: Recommender with the dense weights of the checkpoint.
        objective: Objective of the run.
        programs: Programs by name.
    """

    saved: Checkpoint
    schema: Schema
    recommender: Recommender
    objective: Objective
    programs: dict[ProgramName, Program]

    @property
    def features(self) -> Features:
        """Return the features that the programs read."""
        return resolve_features(self.schema, self.saved.config.model)

    @contextmanager
    def lookups(self, precision: PrecisionName, checked: bool = True) -> Iterator[Lookups]:
        """Yield lookups in the checkpoint's tables, whose files are open for the duration of the block.

        Args:
            precision: Precision to which rows are rounded, as in an export with this precision.
            checked: True to verify the checksums of the rows that are read; see StoredTable.

        Raises:
            CheckpointError: A table or its ids cannot be read or are damaged.
        """
        folder, index, tables = self.saved.folder, self.saved.index, {}
        ids = {name: read_id_rows(folder, index, name, self.schema.tables[name]) for name in self.schema.managed}
        with ExitStack() as files:
            for name in self.schema.tables:
                stored = StoredTable(folder, index, name, checked=checked)
                tables[name] = StackedTable(CheckpointTable(files.enter_context(stored), PRECISIONS[precision]))
            yield Lookups(self.features, tables, ids)


def read_trained(saved: Checkpoint) -> TrainedModel:
    """Load the trained model of a checkpoint, and export its programs.

    Raises:
        ConfigError: torch cannot export the model.
        CheckpointError: The dense weights cannot be read or are damaged.
    """
    config, schema = saved.config, saved.schema
    objective = Objective.of(config, schema)
    recommender = load_model(saved, {})
    inputs = list_inputs(resolve_features(schema, config.model))
    programs: dict[ProgramName, Program] = {"predict": make_program(recommender, objective, inputs)}
    if config.model.retrieves:
        for tower in ("query", "item"):
            programs[tower] = make_program(recommender, objective, inputs, tower)
    inputs_read = [each for program in programs.values() for each in program.inputs]
    names = {each.feature for each in inputs_read if each.feature}
    names |= set(schema.dense) if any(each.kind == "dense" for each in inputs_read) else set()
    with_sides = {each.feature for each in inputs_read if each.kind == "side_features"}
    sparse = {n: s if n in with_sides else s.model_copy(update={"side_features": []}) for n, s in schema.sparse.items()}
    saved = replace(saved, schema=schema.model_copy(update={"sparse": sparse}))
    part = saved.schema.select_features(names)
    tables = {spec.table for spec in part.sparse.values()}
    part = part.model_copy(update={"tables": {n: t for n, t in schema.tables.items() if n in tables}})
    return TrainedModel(saved, part, recommender, objective, programs)


def make_source(trained: TrainedModel) -> ExportSource:
    """Return the manifest entry that describes the model's origin, without paths of this machine."""
    return ExportSource(
        run=trained.saved.config.run.name,
        step=trained.saved.index["about"]["progress"]["step"],
        checkpoint=split_query(trained.saved.folder)[0].rpartition("/")[2],
        checkpoint_id=trained.saved.index["sha256"],
        raytrec=__version__,
        torch=torch.__version__,
    )


def list_tasks(trained: TrainedModel) -> list[TaskEntry]:
    """Return the manifest entry of each task, with the name of its score column."""
    tasks = trained.objective.tasks
    return [
        TaskEntry(name=task.name, label=task.label, column=column, classes=task.outputs, predicts=task.loss.predicts)
        for task, column in zip(tasks, list_score_columns(tasks), strict=True)
    ]


def list_towers(trained: TrainedModel) -> dict[TowerName, list[str]]:
    """Return tower → sorted names of its features and dense columns; empty for models without towers."""
    model, schema = trained.saved.config.model, trained.saved.schema
    if not model.retrieves:
        return {}
    members = model.tower_members(schema)
    return {"query": sorted(members["query"]), "item": sorted(members["item"])}


def plan_stacks(schema: Schema, precision: PrecisionName) -> list[StackEntry]:
    """Return the manifest entries of the stacks, each of which contains all tables of one dim."""
    names: dict[int, list[str]] = {}
    for name, table in schema.tables.items():
        names.setdefault(table.dim, []).append(name)
    stacks = []
    for dim, tables in names.items():
        rows = sum(schema.tables[name].rows for name in tables)
        block_rows = choose_block_rows(PRECISIONS[precision], dim)
        files = [f"tables/dim{dim}-{number:05d}.safetensors" for number in range(-(-rows // block_rows))]
        stacks.append(StackEntry(tables=tables, precision=precision, block_rows=block_rows, files=files))
    return stacks


def iterate_file_bytes(trained: TrainedModel, stack: StackEntry, number: int) -> Iterator[bytes]:
    """Yield the content of a stack's file `number` in pieces. The file begins with row number · block_rows.

    For the format, see scoring/stored_tables.py.

    Raises:
        ConfigError: A value is too large for the precision; see TablePrecision.encode.
        CheckpointError: A table cannot be read or is damaged.
    """
    precision, tables = PRECISIONS[stack.precision], [(name, trained.schema.tables[name]) for name in stack.tables]
    dim, first = tables[0][1].dim, number * stack.block_rows
    end = min(first + stack.block_rows, sum(table.rows for _, table in tables))
    yield make_header(end - first, precision, dim)
    band = max(1, PIECE_BYTES // (4 * dim))
    for name, table in tables:
        if first < table.rows and end > 0:
            with StoredTable(trained.saved.folder, trained.saved.index, name) as stored:
                last = min(end, table.rows)
                for start in range(max(0, first), last, band):
                    values = torch.from_numpy(stored.read(start, min(start + band, last)))
                    yield precision.encode(values).numpy().tobytes()
        first, end = first - table.rows, end - table.rows  # relative to the next table


class CheckpointTable:
    """Rows of a table in a checkpoint, which are read from its files and rounded as in an export.

    Args:
        table: Table of the checkpoint.
        precision: Precision of the export.
    """

    def __init__(self, table: StoredTable, precision: TablePrecision):
        self._table, self._as_stored = table, make_rounding(precision)

    def vectors(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Return the vectors of rows of the table: int64 [N], in any order → float32 [N, dim]."""
        used, places_N = rows_N.unique(return_inverse=True)
        return self._as_stored(torch.from_numpy(self._table.take(used.tolist())))[places_N]


def make_rounding(precision: TablePrecision) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that encodes and decodes rows, float32 [n, dim] → [n, dim]; see TablePrecision.encode."""
    return lambda rows_ND: precision.decode(precision.encode(rows_ND))

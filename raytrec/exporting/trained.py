"""A checkpoint that is exported: its programs, and its part of the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from raytrec import __version__
from raytrec.checkpoint.managed import ids_of
from raytrec.checkpoint.rows import StoredTable
from raytrec.common.storage import split_query
from raytrec.config.features import Features, resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tasks import TowerName
from raytrec.embeddings.hashing import keys_of
from raytrec.exporting.programs import Program, make_program
from raytrec.exporting.tables import CheckpointTable
from raytrec.models.recommender import Recommender
from raytrec.prediction.one_process import load_model
from raytrec.prediction.predict import score_names
from raytrec.scoring.lookups import PRECISIONS, IdRows, Lookups
from raytrec.scoring.manifest import ExportSource, PrecisionName, ProgramName, TaskEntry, inputs_of
from raytrec.tasks.objective import Objective


@dataclass(frozen=True)
class Trained:
    """A checkpoint that is exported.

    Attributes:
        folder, index: of the checkpoint.
        whole_schema: of the run. schema: of the features that the programs read, with their tables.
    """

    config: RunConfig
    folder: str
    index: dict[str, Any]
    whole_schema: Schema
    schema: Schema
    recommender: Recommender
    objective: Objective
    programs: dict[ProgramName, Program]

    @property
    def features(self) -> Features:
        """Of what the programs read."""
        return resolve_features(self.schema, self.config.model)

    @contextmanager
    def lookups(self, precision: PrecisionName, checked: bool = True) -> Iterator[Lookups]:
        """Lookups in the checkpoint's tables, whose rows are rounded as the export has them.

        Args:
            checked: see StoredTable.
        """
        ids = {}
        for name in self.schema.managed:
            found = ids_of(self.folder, self.index, name, ("id", "row"))
            ids[name] = IdRows(self.schema.tables[name], keys_of(found["id"]), found["row"])
        with ExitStack() as files:
            tables = {}
            for name in self.schema.tables:
                stored = files.enter_context(StoredTable(self.folder, self.index, name, checked=checked))
                tables[name] = CheckpointTable(stored, PRECISIONS[precision])
            yield Lookups(self.features, tables, ids)


def read_trained(config: RunConfig, schema: Schema, folder: str, index: dict[str, Any]) -> Trained:
    """A checkpoint with its programs.

    Raises:
        ConfigError: torch cannot export the model.
    """
    objective = Objective.of(config, schema)
    recommender = load_model(config, schema, folder, index, {})
    inputs = inputs_of(resolve_features(schema, config.model))
    programs: dict[ProgramName, Program] = {"predict": make_program(recommender, objective, inputs)}
    if config.model.retrieves:
        for tower in ("query", "item"):
            programs[tower] = make_program(recommender, objective, inputs, tower)
    read = [each for program in programs.values() for each in program.inputs]
    names = {each.feature for each in read if each.feature}
    names |= set(schema.dense) if any(each.kind == "dense" for each in read) else set()
    part = schema.part(names)
    tables = {spec.table for spec in part.sparse.values()}
    part = part.model_copy(update={"tables": {n: t for n, t in schema.tables.items() if n in tables}})
    return Trained(config, folder, index, schema, part, recommender, objective, programs)


def source_of(trained: Trained) -> ExportSource:
    """Return the origin of the model, without paths of this machine."""
    return ExportSource(
        run=trained.config.run.name,
        step=trained.index["about"]["progress"]["step"],
        checkpoint=split_query(trained.folder)[0].rpartition("/")[2],
        checkpoint_id=trained.index["sha256"],
        raytrec=__version__,
        torch=torch.__version__,
    )


def tasks_of(trained: Trained) -> list[TaskEntry]:
    """The tasks, and the columns of their predictions."""
    tasks = trained.objective.tasks
    return [
        TaskEntry(
            name=task.name, label=task.label, column=column, classes=task.outputs, predicts=task.loss.predicts
        )
        for task, column in zip(tasks, score_names(tasks), strict=True)
    ]


def towers_of(trained: Trained) -> dict[TowerName, list[str]]:
    """The features and dense columns of query and item; nothing of other models."""
    model, schema = trained.config.model, trained.whole_schema
    if not model.retrieves:
        return {}
    members = model.tower_members(schema)
    return {"query": sorted(members["query"]), "item": sorted(members["item"])}

"""Commands on a trained run or checkpoint: `raytrec evaluate`, `convert` and `inspect --from-run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from raytrec.checkpoint.files import find, find_best, find_step
from raytrec.checkpoint.index import INDEX
from raytrec.checkpoint.rows import parse_stored_schema
from raytrec.common.errors import ConfigError, RunError, SchemaError, make_unknown_word_error
from raytrec.common.messages import RANKS
from raytrec.common.storage import join_uri, make_absolute, query_file_info
from raytrec.config.overrides import Overrides, get_section_name, to_override_texts
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.config.trust import find_checkpoint_origin
from raytrec.data.item_reader import check_suspect_groups
from raytrec.driver.console import Result, RunConsole
from raytrec.driver.datasets import check_usable_rows, open_dataset, open_items, record_skipped_files, show_file_counts
from raytrec.driver.launch import open_session, run_group
from raytrec.driver.prepare import create_scratch_folder
from raytrec.driver.recorder import Watch
from raytrec.driver.resume import load_stored_schema
from raytrec.metrics.selection import Selection
from raytrec.planning.loads import compute_recorded_lengths, replace_lengths
from raytrec.tracking.run_folder import CONFIG, RunFolder, check_run_folder
from raytrec.worker.context import WorkerTask
from raytrec.worker.loop import evaluate_worker

if TYPE_CHECKING:
    from raytrec.checkpoint.convert import TableConversion

# Sections that affect an evaluation without changing the model.
OVERRIDABLE_SECTIONS = ("data", "scaling", "plan", "train", "eval")
OUT_OF_RANGE_KEY = "out_of_range"
TABLE_KINDS = "managed, resize:ROWS or hash"  # target kinds of a conversion


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint with the configuration and schema from which its model is built.

    Attributes:
        config: Configuration of the run, with overrides applied.
        schema: Schema of the run, with overrides applied.
        folder: Path or URI of the checkpoint.
        index: Content of the checkpoint's index file.
    """

    config: RunConfig
    schema: Schema
    folder: str
    index: dict[str, Any]

    @property
    def text_ids(self) -> dict[str, bool]:
        """Return sparse feature → True if its ids in the training data are text, False if they are integers.

        Features whose kind of ids is unknown are omitted.
        """
        return self.index["about"].get("text_ids", {})


def load_evaluation_config(
    about: dict[str, Any], folder: str, overrides: list[str], *, allow_code: bool
) -> tuple[RunConfig, Schema]:
    """Return the configuration and the schema of a checkpoint, with the overrides of an evaluation applied.

    Args:
        about: Entry `about` of the checkpoint's index file: configuration, schema and position of the run.
        folder: Folder of the checkpoint.
        overrides: `section.key=value` strings for the sections data, scaling, plan, train and eval, or
            `tables.NAME.out_of_range=RULE` (error, clamp or hash), where NAME may be a pattern such as `item*`.
        allow_code: True if the configuration may name code (config/trust.py).

    Raises:
        ConfigError, SchemaError: An override is invalid or would change the model, or code is not allowed.
    """
    of_tables = [override for override in overrides if override.startswith("tables.")]
    of_sections = [override for override in overrides if override not in of_tables]
    for override in of_sections:
        if get_section_name(override) not in OVERRIDABLE_SECTIONS:
            raise ConfigError(
                f"'{override}' does not apply to a trained model",
                where="overrides (--set)",
                expected=f"a key of {', '.join(OVERRIDABLE_SECTIONS)}, or tables.NAME.{OUT_OF_RANGE_KEY}; "
                "the model cannot be changed",
            )
    elsewhere = find_checkpoint_origin(folder, about["config"])
    config = load_config(about["config"], of_sections, elsewhere=elsewhere, allow_code=allow_code)
    values = parse_stored_schema(about).model_dump()
    for override in of_tables:
        _apply_table_override(values["tables"], override)
    where = "the checkpoint's schema" + "".join(f" with {override}" for override in of_tables)
    return config, Schema.parse(values, where, "correct the override")


def _apply_table_override(tables: dict[str, dict[str, Any]], override: str) -> None:
    """Set out_of_range in the plain values of the matching tables, in place; `Schema.parse` checks the rule.

    Raises:
        ConfigError: The override names another setting, or no table matches.
    """
    key, _, rule = override.partition("=")
    pattern, _, setting = key.removeprefix("tables.").rpartition(".")
    if setting != OUT_OF_RANGE_KEY:
        raise ConfigError(
            f"'{override}' does not apply to a trained model",
            where="overrides (--set)",
            expected=f"tables.NAME.{OUT_OF_RANGE_KEY}=error, clamp or hash; a table's other settings are fixed",
        )
    matches = [table for table in tables if fnmatchcase(table, pattern)]
    if not matches:
        raise ConfigError(
            f"no table has a name that matches '{pattern}'",
            where=f"override {override}",
            expected=f"one of {', '.join(tables)}, or a pattern such as '*'",
        )
    for table in matches:
        tables[table][OUT_OF_RANGE_KEY] = rule


def evaluate(
    place: str | Path,
    data: str | None = None,
    *,
    workers: int | None = None,
    batch_size: int | None = None,
    overrides: Overrides | None = None,
    allow_code: bool = False,
) -> Result:
    """Evaluate the newest checkpoint of a run, or a given checkpoint, on Parquet data.

    The folder of the run is not changed.

    Args:
        place: Run folder or checkpoint folder.
        data: Parquet folder or file (local, s3:// or gs://); default: data.test of the run, else data.valid.
        workers: Number of workers (scaling.num_workers); default: as in training.
        batch_size: Global batch size in rows; default: as in training.
        overrides: `section.key=value` strings, or a mapping, for data, scaling, plan, train and eval, such as
            data.on_error=skip, or tables.NAME.out_of_range=RULE.
        allow_code: True if the configuration in `place` may name code (raytrec/config/trust.py).

    Returns:
        Result: eval.* metrics, world_size, skipped_files, seconds and name; the path of the checkpoint.

    Raises:
        RunError: There is no checkpoint in `place`, Ray cannot be started or joined, or a worker failed.
        ConfigError, SchemaError, DataError: The input is invalid, names code that is not allowed, changes the model,
            or does not fit the cluster.
        CheckpointError: The checkpoint is damaged.
        Interrupted: Ctrl-C or SIGTERM ended the evaluation.

    Example:
        >>> raytrec.evaluate("runs/films", "films/valid").metrics["eval.rows"]
        160
    """
    began = perf_counter()
    changes = [f"scaling.num_workers={workers}"] if workers else []
    changes += [f"data.global_batch_size={batch_size}"] if batch_size else []
    changes += to_override_texts(overrides)
    saved = resolve_checkpoint(place, None, changes, allow_code)
    config, schema, folder = saved.config, saved.schema, saved.folder
    key = "data.test" if config.data.test else "data.valid"
    places = make_absolute(data) if data else config.data.test or config.data.valid
    if not places:
        raise ConfigError("the run has neither data.test nor data.valid", where=folder, do="pass --data PARQUET")
    if config.eval.retrieval:
        config.eval.retrieval.items = make_absolute(config.eval.retrieval.items)
    datasets = {"test": open_dataset(config, schema, places, "--data" if data else key, trained=saved.text_ids)}
    datasets |= open_items(config, schema, datasets, saved.text_ids)
    for dataset in datasets.values():
        check_suspect_groups(dataset)
        check_usable_rows(dataset)
    with create_scratch_folder() as config.run.dir, RunConsole(config.run.name) as console, open_session(config):
        show_file_counts(console, {data or key if name == "test" else name: each for name, each in datasets.items()})
        for line in (left_out := record_skipped_files(Path(config.run.dir), datasets)):
            console.warn(line)
        figures = run_group(evaluate_worker, WorkerTask(config, schema, datasets, None, folder), Watch(console))
    metrics = {
        **figures,
        "skipped_files": len(left_out),
        "seconds": round(perf_counter() - began, 3),
        "name": f"{config.run.name} on {data or datasets['test'].uri}",
    }
    return Result(metrics, folder if "://" in folder else Path(folder))


def resolve_checkpoint(
    place: str | Path, checkpoint: str | int | None, changes: list[str], allow_code: bool
) -> Checkpoint:
    """Return a checkpoint with its configuration and schema.

    Args:
        place: Run folder or checkpoint folder.
        checkpoint: Step, "best" or "newest" of a run; default: the newest.
        changes: Overrides as in `load_evaluation_config`.
        allow_code: True if the configuration may name code (config/trust.py).

    Raises:
        ConfigError, SchemaError: `checkpoint` has another value, a change is invalid or would change the model, the
            configuration names code that is not allowed, or no metric can rank checkpoints ("best").
        RunError: There is no such checkpoint, or no checkpoint has the metric ("best").
        CheckpointError: The index of the checkpoint is damaged, or the checkpoint is not from a training run.
        DataError: `place` is not a valid path, or its store cannot be reached.
    """
    is_step = str(checkpoint).isdecimal()
    if not is_step and checkpoint not in (None, "newest", "best"):
        raise ConfigError(
            f"'{checkpoint}' is not a checkpoint of a run",
            where="--checkpoint",
            expected="a step such as 1200, best, or newest",
            do="pass one of these values, or a checkpoint folder in place of the run folder",
        )
    folder, index = find_step(place, int(checkpoint)) if is_step else find(place)
    config, schema = load_evaluation_config(index["about"], folder, changes, allow_code=allow_code)
    if checkpoint == "best":
        by = Selection.from_config(config, schema).best(config.checkpoint.best_metric)
        folder, index = find_best(place, by)
        config, schema = load_evaluation_config(index["about"], folder, changes, allow_code=allow_code)
    return Checkpoint(config, schema, folder, index)


def convert(
    place: str | Path, tables: Sequence[str], out: str, *, checkpoint: str | int | None = None, allow_code: bool = False
) -> tuple[str, list[str]]:
    """Write a copy of a checkpoint in which tables have another number of rows, or map ids to rows differently.

    Weights and optimizer state of rows that remain are kept bit for bit. The new checkpoint can be used for
    a new run (`--warm-start`), evaluations and predictions. The conversion needs memory for a few blocks, plus 8
    bytes per row and 32 bytes per managed id of each table that changes.

    Args:
        place: Run folder or checkpoint folder, which is not changed.
        tables: TABLE=KIND texts, where KIND is managed, resize:ROWS or hash (docs/managed_ids.md).
        out: Folder to write to, local or s3:// or gs://.
        checkpoint: Step, "best" or "newest" of a run; default: the newest.
        allow_code: True if a configuration written by another user may name code (config/trust.py).

    Returns:
        Path or URI of the new checkpoint, and a line for the user about each converted table.

    Raises:
        RunError: There is no such checkpoint in `place`.
        ConfigError, SchemaError: As in `resolve_checkpoint`; a text in `tables` is invalid, a table does not exist, is
            named twice or cannot be converted to its kind, or `out` already contains a checkpoint.
        CheckpointError: The checkpoint is damaged, or the new checkpoint cannot be written.
        DataError: A path is not valid, or its store cannot be reached.
    """
    saved = resolve_checkpoint(place, checkpoint, [], allow_code)
    schema, folder, index = saved.schema, saved.folder, saved.index
    kinds, out = _parse_table_kinds(tables, schema), make_absolute(out).rstrip("/")
    if query_file_info(join_uri(out, INDEX)).is_file:
        expected = "a folder without a checkpoint"
        raise ConfigError("the folder already contains a checkpoint", where=f"--out {out}", expected=expected)
    from raytrec.checkpoint.convert import rewrite_checkpoint

    changes = {table: _build_table_change(folder, index, schema, table, kind) for table, kind in kinds.items()}
    new_tables = {table: change.table for table, change in changes.items()}
    schema = schema.model_copy(update={"tables": {**schema.tables, **new_tables}})
    about = {**index["about"], "schema": schema.to_yaml()}
    about["ids"] = dict(about.get("ids", {})) | {t: dict(c.about) for t, c in changes.items() if c.about}
    rewrite_checkpoint(folder, index, out, changes, about, saved.config.run.seed)
    return out, [change.note for change in changes.values()]


def _parse_table_kinds(tables: Sequence[str], schema: Schema) -> dict[str, str]:
    """Parse TABLE=KIND texts, and return table → KIND; the ROWS of a resize are not checked.

    Raises:
        ConfigError: A text is invalid, a table is named twice, or there is no text.
        SchemaError: There is no such table.
    """
    kinds: dict[str, str] = {}
    for text in tables:
        table, equals, kind = text.partition("=")
        if not equals or not (kind in ("managed", "hash") or kind.partition(":")[0] == "resize"):
            raise ConfigError(f"--table {text} is invalid", expected=f"TABLE=KIND, where KIND is {TABLE_KINDS}")
        if table not in schema.tables:
            what, where = f"there is no table '{table}'", f"--table {text}"
            raise make_unknown_word_error(what, table, schema.tables, where, kind=SchemaError)
        if table in kinds:
            raise ConfigError(f"--table names {table} twice", expected="one kind for each table")
        kinds[table] = kind
    if not kinds:
        raise ConfigError("--table is missing", expected=f"TABLE=KIND, where KIND is {TABLE_KINDS}")
    return kinds


def _build_table_change(folder: str, index: dict, schema: Schema, name: str, kind: str) -> TableConversion:
    """Return the conversion of a table to a KIND; raise ConfigError if the table or KIND does not permit it."""
    from raytrec.checkpoint.convert import resize_table, to_hash, to_managed

    table = schema.tables[name]
    if convert_table := {"managed": to_managed, "hash": to_hash}.get(kind):
        return convert_table(name, table)
    rows = kind.partition(":")[2].replace("_", "")
    if not rows.isdecimal() or not 0 < int(rows) < 2**62:
        raise ConfigError(f"--table {name}={kind} is invalid", expected="ROWS from 1 to 2⁶²-1, as in resize:100000")
    return resize_table(folder, index, name, table, int(rows))


def read_run_schema(place: str | Path) -> Schema:
    """Return a run's schema, with statistics from the mean numbers of ids per row that the run's ranks have recorded.

    Raises:
        RunError: The folder contains no run, its schema cannot be read, or its ranks have not recorded any lookups.
        ConfigError, SchemaError: The configuration or schema in the folder is invalid.
    """
    folder = check_run_folder(place)
    config, schema = load_config(str(folder / CONFIG)), load_stored_schema(folder)
    lengths = compute_recorded_lengths(RunFolder.read(folder).ranks, config, schema)
    if not lengths:
        raise RunError(
            "the run has not recorded any lookups of ids",
            where=str(folder / RANKS),
            expected="one line with lookups per rank for every tracking.every_steps steps",
            do="set tracking.every_steps if it is null, and train at least as many steps",
        )
    return replace_lengths(config, schema, lengths)

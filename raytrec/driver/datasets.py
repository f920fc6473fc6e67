"""Open the datasets of a command by reading their Parquet footers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from raytrec.checkpoint.index import INDEX, read_index
from raytrec.checkpoint.rows import parse_stored_schema
from raytrec.common.errors import ConfigError, DataError
from raytrec.common.formatting import format_count
from raytrec.common.storage import get_sibling, split_query
from raytrec.config.features import resolve_features, resolve_input_columns, select_needed_transforms
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tasks import TowerName
from raytrec.config.transforms import OnColumns
from raytrec.data.arrow import AmbiguousColumnError, find_column, is_list, plain, type_at
from raytrec.data.files.footers import read_footer
from raytrec.data.files.listing import join_folder_names, list_files
from raytrec.data.fragments import Dataset, scan
from raytrec.data.item_reader import check_suspect_groups
from raytrec.data.pages.decode import SKIPPED_ROWS_FILE, ReadErrorPolicy
from raytrec.data.read_plans import ReadPlan, ReservedColumnSet
from raytrec.data.type_checks import IdKinds
from raytrec.driver.console import RunConsole
from raytrec.driver.item_checks import check_item_ids, check_item_keys, check_item_types
from raytrec.tasks.task import resolve_tasks
from raytrec.tasks.task_columns import build_read_plan, check_frequency_columns, check_group_columns, log_odds

MAX_HOLDOUT_ROWS = 100_000  # approximate maximum number of rows that data.holdout=auto holds out


def select_tower_schema(config: RunConfig, schema: Schema, tower: TowerName, where: str) -> Schema:
    """Return a schema reduced to the features of one tower (docs/retrieval.md).

    Args:
        config: Configuration of the run.
        schema: Schema of the run.
        tower: Name of the tower, query or item.
        where: Setting or option that needs the tower, for messages.

    Raises:
        ConfigError: The model does not produce query and item vectors.
    """
    if not config.model.retrieves:
        raise ConfigError(
            f"model.name={config.model.name} does not produce query and item vectors",
            where=where,
            expected="a model with a query and an item tower, such as two_tower (docs/retrieval.md)",
        )
    return schema.select_features(config.model.tower_members(schema)[tower])


def open_inputs(
    config: RunConfig,
    schema: Schema,
    places: str | list[str],
    key: str = "--data",
    reserve_columns: tuple[str, ...] = (),
    reserved_by: str = "--item",
    trained: IdKinds | None = None,
) -> Dataset:
    """Open Parquet files as a dataset without labels by reading their footers.

    Args:
        config: Configuration of the run.
        schema: Schema of the run, or its part for one tower, whose inputs are read.
        places: Parquet files or folders, as paths or URIs.
        key: Setting or option that names the places, for messages.
        reserve_columns: Additional columns whose values are passed through unchanged (Batch.reserved).
        reserved_by: Setting or option that names these columns, for messages.
        trained: Sparse feature → True if its training ids are text; ids in the files must be of this kind. None: any.

    Raises:
        DataError: There are no files or rows, a transform fails, files cannot be read, or their columns or types do
            not match the schema. With data.on_error=skip, errors of single files are in Dataset.left_out instead.
    """
    transforms = select_needed_transforms(tuple(config.data.transforms), [*schema.inputs, *reserve_columns])
    named_by = dict.fromkeys(reserve_columns, reserved_by)
    reserved = ReservedColumnSet(reserve_columns, groups=reserve_columns, named_by=named_by)
    plan = ReadPlan(schema, transforms, reserved=reserved, read_labels=False)
    return scan(places, plan, key, skip=config.data.on_error == "skip", trained=trained)


def to_example_schema(config: RunConfig, schema: Schema, places: str | list[str]) -> Schema:
    """Return the run's schema without candidates, for predictions, indexes and exports, which score rows one by one.

    If the schema has candidates, the types of their columns are read from the footer of the first file in `places`
    (Parquet files or folders of --data).

    Raises:
        DataError: A column of the first file contains lists of candidates, there is no file, or the first file cannot
            be read.
    """
    if not schema.candidates:
        return schema
    arrow = read_footer(list_files(places, "--data").files[0]).schema.to_arrow_schema()
    names = schema.select_candidate_names([*schema.dense, *schema.sparse])
    columns = [schema.get_ids_column(name) if name in schema.sparse else name for name in names]
    transforms = tuple(each for each in config.data.transforms if isinstance(each, OnColumns))
    for name in resolve_input_columns(select_needed_transforms(transforms, columns), columns):
        with suppress(AmbiguousColumnError):  # `scan` reports the name
            path = find_column(arrow, name)
            if path and is_list(plain(type_at(arrow, path))):
                raise DataError(
                    f"column '{name}' contains lists of candidates",
                    where=join_folder_names(places),
                    expected="one row for each candidate, because scores and vectors are computed row by row",
                    do="pass files with one row per candidate; only training and evaluations read lists of candidates",
                )
    return schema.model_copy(update={"candidates": []})


def open_items(
    config: RunConfig, schema: Schema, evaluated: Mapping[str, Dataset], trained: IdKinds
) -> dict[str, Dataset]:
    """Open the items of eval.retrieval as a dataset of the run.

    Args:
        config: Configuration of the run.
        schema: Schema of the run.
        evaluated: Name → dataset whose columns contain keys of items. The types of the keys are checked in every
            dataset, and the keys of a sample of rows in every dataset except "train".
        trained: Sparse feature → True if its ids in the training data are text.

    Returns:
        {"items": dataset}, or {} without eval.retrieval.

    Raises:
        ConfigError: The model does not produce query and item vectors.
        DataError: As in `open_inputs`; or an item has no unique key, or columns of the data contain other keys.
    """
    section = config.eval.retrieval
    if section is None:
        return {}
    part = select_tower_schema(config, schema, "item", "eval.retrieval")
    places = "eval.retrieval.items"
    items = open_inputs(config, part, section.items, places, (section.item,), "eval.retrieval.item", trained)
    check_item_keys(items, section.item)
    for name, dataset in evaluated.items():
        check_item_types(section, items, dataset)
        if name != "train":
            check_item_ids(section, items, dataset)
    return {"items": items}


def check_lookup_l2(config: RunConfig, schema: Schema, datasets: Mapping[str, Dataset]) -> None:
    """Check that the model reads single rows of the tables in model.lookup_l2, not vectors pooled from several rows.

    Raises:
        ConfigError: A feature that looks up one of these tables contains lists of ids, whose vectors are pooled, or
            has weights; or model.lookup_l2 names an unknown table.
    """
    by_id = resolve_features(schema, config.model).sequences
    for feature in config.model.l2_factors(schema):
        if feature not in by_id and any(feature in dataset.form.lists for dataset in datasets.values()):
            raise ConfigError(
                f"feature {feature} contains lists of ids, whose vectors are pooled before they reach the model",
                where="model.lookup_l2",
                expected="tables of features with one id per row, or of sequences that are read id by id",
                do=f"omit table {schema.sparse[feature].table} from model.lookup_l2={{TABLE: …}}, or use "
                f"optim.tables.{schema.sparse[feature].table}.weight_decay",
            )


def check_sample_counts(config: RunConfig, schema: Schema, train: Dataset) -> None:
    """Check that the model reads all sampled ids of each row, if a transform `do: sample` has `count: all`.

    Raises:
        ConfigError: The model reads fewer ids per row.
    """
    sequences = resolve_features(schema, config.model).sequences
    rows = max(1, min(config.data.global_batch_size, train.rows))
    for feature, count in train.form.full_vocabulary_features.items():
        per_row, read_ids = -(-count // rows), sequences.get(feature, 1)
        is_negatives = getattr(config.model, "negatives", None) == feature
        if per_row > read_ids:
            raise ConfigError(
                f"each row gets {per_row} ids of {feature} (ids: {count:,}, rows per global batch: {rows:,}), "
                f"but the model reads at most {read_ids} per row",
                where=f"data.transforms, do: sample, column: {schema.get_ids_column(feature)}, count: all",
                expected=f"a model that reads at least {per_row} ids per row",
                do=(f"set model.max_negatives={per_row}" if is_negatives else f"set count: {read_ids} in the transform")
                + (", or a larger data.global_batch_size" if rows < train.rows else ""),
            )


def open_data(config: RunConfig) -> tuple[Schema, dict[str, Dataset]]:
    """Open the schema and the datasets of a run, and check their columns and rows.

    Returns:
        The schema, and the datasets by name: "train"; "valid", "test" and "items" if the run has them.

    Raises:
        ConfigError, SchemaError, DataError: The schema or data are missing, invalid, or do not match the config.
        CheckpointError: data.schema is the index of a checkpoint that cannot be read or is damaged.
    """
    data = config.data
    list_files(data.train, "data.train")  # report missing data before the missing schema next to it
    folder, name = get_sibling(data.schema_uri, ""), split_query(data.schema_uri)[0].rpartition("/")[2]
    schema = parse_stored_schema(read_index(folder)["about"]) if name == INDEX else Schema.load(data.schema_uri)
    datasets = {"train": open_dataset(config, schema, data.train, "data.train")}
    kinds = datasets["train"].text_ids
    for name in ("valid", "test"):
        if places := getattr(data, name):
            datasets[name] = open_dataset(config, schema, places, f"data.{name}", trained=kinds)
    if config.train.eval_every_steps == "next_folder":
        if not datasets["train"].split_after_first_folder(data.global_batch_size):
            raise DataError(
                "no folder of data.train begins after the first global batch, so train.eval_every_steps=next_folder "
                "would evaluate nothing",
                where=f"{datasets['train'].uri}, data.global_batch_size={data.global_batch_size}",
                expected="two or more folders of files, such as one per day",
                do="set data.train to the days' parent folder, widen data.partitions, or lower data.global_batch_size",
            )
        datasets["valid"] = open_dataset(config, schema, data.train, "data.train", held_out=True)
    if data.holdout and not data.valid:
        datasets |= hold_out(datasets["train"], data.holdout)
        if config.eval.slices or config.eval.retrieval:
            read_more = open_dataset(config, schema, data.train, "data.train", held_out=True)
            datasets["valid"] = hold_out(read_more, data.holdout)["valid"]
    check_lookup_l2(config, schema, datasets)
    check_sample_counts(config, schema, datasets["train"])
    datasets |= open_items(config, schema, datasets, kinds)
    for name, dataset in datasets.items():
        check_suspect_groups(dataset)
        check_usable_rows(dataset, to_train=name == "train")
    rows = datasets["train"].rows
    if config.data.drop_last and rows < config.data.global_batch_size:
        raise DataError(
            f"training has {format_count(rows, 'row')}, fewer than one global batch, which data.drop_last drops",
            where=f"{datasets['train'].uri}, data.global_batch_size={config.data.global_batch_size}",
            expected=f"at least {config.data.global_batch_size:,} rows, or data.drop_last=false",
            do=f"set data.drop_last=false, or lower data.global_batch_size to {rows} or less",
        )
    if config.train.initial_bias == "log_odds":
        datasets["train"] = replace(datasets["train"], log_odds=log_odds(config, schema, datasets["train"]))
    return schema, datasets


def hold_out(train: Dataset, share: float | Literal["auto"]) -> dict[str, Dataset]:
    """Split the training data into "train" and "valid".

    Args:
        train: Training data.
        share: Share of rows to hold out (data.holdout), rounded to 1/n; "auto": a tenth, at most about
            MAX_HOLDOUT_ROWS rows.

    Returns:
        {"train": remaining rows, "valid": held-out rows}.

    Raises:
        DataError: No row group has n rows, so none can be held out.
    """
    every = max(10, -(-train.rows // MAX_HOLDOUT_ROWS))
    every = every if share == "auto" else round(1 / share)
    remaining, held_out = train.hold_out(every)
    if held_out is None:
        raise DataError(
            f"data.holdout cannot hold out a row of every {every:,}, because all row groups are smaller",
            where=train.uri,
            expected=f"a row group of at least {every:,} rows",
            do="set data.valid, set data.holdout to a larger share, or write larger row groups",
        )
    return {"train": remaining, "valid": held_out}


def open_dataset(
    config: RunConfig,
    schema: Schema,
    places: str | list[str],
    key: str,
    *,
    held_out: bool = False,
    trained: IdKinds | None = None,
) -> Dataset:
    """Open a dataset of a run by reading its footers.

    Args:
        config: Configuration of the run.
        schema: Schema of the run.
        places: Parquet files or folders.
        key: Configuration key of the dataset, or the option --data. For data.train, only data.partitions are read,
            and columns that only evaluations need are omitted.
        held_out: True if rows of data.train are opened for evaluations, so that no column is omitted.
        trained: Sparse feature → True if its training ids are text; ids in the files must be of this kind. None: any.

    Raises:
        ConfigError: A task is invalid, or a column by which rows are grouped is not in data.reserve_columns.
        DataError: As in `open_inputs`; or the values of a task's column of item frequencies have a wrong type.
    """
    data, tasks = config.data, resolve_tasks(config.tasks, schema)
    check_group_columns(tasks, config.eval.slices, data.reserve_columns)
    to_train = key == "data.train"
    needed_by = (config.eval.slices, config.eval.retrieval) if held_out or not to_train else ()
    plan = build_read_plan(tasks, schema, data.transforms, *needed_by)
    between = (data.partitions.from_, data.partitions.to) if to_train else (None, None)
    skip, declared = data.on_error == "skip", data.reserve_columns
    dataset = scan(places, plan, key, between=between, declared=declared, skip=skip, trained=trained)
    check_frequency_columns(tasks, dataset.form.types, dataset.uri)
    return dataset


def check_usable_rows(dataset: Dataset, *, to_train: bool = False) -> None:
    """Check in the footers that every task in training, or at least one task in an evaluation, can use some rows.

    Args:
        dataset: Dataset to check.
        to_train: True for training data, False for data of an evaluation.

    Raises:
        DataError: In training data, a task can use no row; in other data, no task can use any row.
    """
    empty = dataset.empty_tasks
    if empty and (to_train or len(empty) == len(dataset.form.plan.tasks)):
        task, why = next(iter(empty.items()))
        raise DataError(
            f"no row can be used for task {task}: {why}",
            where=f"tasks, {dataset.uri}",
            expected="rows that the task learns from" if to_train else "rows that a metric can use",
            do="correct the task's label, mask or sample_weight, or the data; or remove the task"
            if to_train
            else "use data in which the task's label, mask and sample_weight leave rows",
        )


def show_file_counts(console: RunConsole, datasets: Mapping[str, Dataset]) -> None:
    """Show how many files of each dataset are read, and why other files in its folders are not read."""
    for name, dataset in datasets.items():
        if dataset.listing.files:  # held-out rows are in files of another dataset
            console.note(f"{name}: {dataset.listing}")


def record_skipped_files(folder: Path, datasets: dict[str, Dataset]) -> list[str]:
    """Record in skipped.jsonl of a folder which files data.on_error=skip skips, and return a warning for each file.

    Raises:
        RunError: skipped.jsonl cannot be written.
    """
    faults = ReadErrorPolicy(skip=True, log=str(folder / SKIPPED_ROWS_FILE))
    errors = [error for dataset in datasets.values() for error in dataset.left_out]
    for error in errors:
        faults.leave_out(error, rows=None)  # the number of their rows is unknown
    return [f"skipped a file: {error.what} ({error.where})" for error in errors]

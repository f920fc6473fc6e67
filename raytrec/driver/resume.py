"""Resume interrupted runs and warm-start from checkpoints; reject incompatible changes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from raytrec.checkpoint.files import find, find_newest_checkpoint
from raytrec.checkpoint.rows import parse_stored_schema, resolve_warm_starts
from raytrec.common.errors import ConfigError, DataError, RunError, SchemaError, convert_os_errors, get_first_line
from raytrec.common.formatting import flatten, format_count
from raytrec.common.reading import parse_json, read_bytes, read_text
from raytrec.common.storage import make_absolute, quote_for_shell
from raytrec.config.base import Mark
from raytrec.config.run_config import RunConfig, list_keys_with, load_config
from raytrec.config.schema import Schema
from raytrec.config.trust import describe_foreign_file, find_foreign_code, is_own_file, refuse_code
from raytrec.data.files.file_identity import FileIdentity, fingerprint, list_differences, list_rewritten_files
from raytrec.data.fragments import Dataset
from raytrec.data.type_checks import ONE_KIND, IdKinds, describe_kind
from raytrec.driver.recorder import RESULT, write_json
from raytrec.embeddings.constraints import resolve_optimizers
from raytrec.tracking.run_folder import DATA, FILES_KEY, SCHEMA

FREE_KEYS, FIXED_KEYS = list_keys_with(Mark.FREE), list_keys_with(Mark.FIXED)  # keys that may or must not change
MAX_SHOWN_PARAMETERS = 5  # maximum number of newly initialized dense parameters named in a line


def resume_config(place: str | Path, source: Any, overrides: list[str], allow_code: bool = False) -> RunConfig:
    """Return the configuration with which an unfinished run is resumed, with permitted changes applied.

    Args:
        place: Run folder.
        source: Config that replaces config.yaml of the run, with permitted changes only; None: config.yaml.
        overrides: `section.key=value` strings.
        allow_code: True if a configuration that is not the user's own may name code (config/trust.py): a source
            from a URI, or the configuration in a run folder that another user has written.

    Raises:
        RunError: The folder contains no run, or a finished run.
        ConfigError: A change is invalid or not permitted, config.yaml is damaged, the configuration names code that is
            not allowed, or `place` is relative in a Ray job.
        DataError: `source` is a URI that is not valid, or whose store cannot be reached.
    """
    folder = Path(make_absolute(str(place)))
    file = folder / "config.yaml"
    check_unfinished(folder)
    if not file.is_file():
        raise RunError(
            "the folder does not contain a run",
            where=str(folder),
            expected="a run folder with a config.yaml",
            do="pass the folder that `raytrec train` printed (run.dir)",
        )
    stored = load_config(file, allow_code=True)  # none of the code that it names runs until it is allowed
    foreign = {} if allow_code or is_own_file(file) else find_foreign_code(stored.model_dump(by_alias=True))
    elsewhere = describe_foreign_file(file) if foreign and source is None else None
    config = load_config(stored if source is None else source, overrides, elsewhere=elsewhere, allow_code=allow_code)
    for section, key in (("run", "name"), ("run", "dir"), ("warm_start", "from_"), ("checkpoint", "dir")):
        part = getattr(config, section)
        if getattr(part, key) is None:
            setattr(part, key, getattr(getattr(stored, section), key))
    inherited = {key: code for key, code in foreign.items() if key in ("warm_start.from", "checkpoint.dir")}
    refuse_code(inherited, config.model_dump(by_alias=True), describe_foreign_file(file))
    changes_folder = source is None or any(each.partition("=")[0].strip() == "run.dir" for each in overrides)
    if changes_folder and make_absolute(config.run.dir or "", config.run.root) not in (stored.run.dir, str(folder)):
        raise ConfigError(
            "run.dir cannot be changed on resume, because a resumed run continues in its own folder",
            where=f"run.dir: {config.run.dir}",
            expected=str(folder),
            do="remove run.dir, or move the run folder and resume it there",
        )
    config.run.dir = str(folder)  # the folder may have been moved
    if "tracking.uri" not in foreign:
        config.tracking.uri = config.tracking.uri or stored.tracking.uri
    if changed := _list_differences(stored, config):
        raise ConfigError(
            "these settings affect the result and cannot be changed on resume:\n" + "\n".join(changed),
            where=str(file),
            expected="the configuration that the run started with",
            do="restore these settings, or start a new run; the option --warm-start "
            f"{quote_for_shell(place)} loads the weights of this run's newest checkpoint, if there is one",
        )
    return config


def check_unfinished(folder: Path) -> None:
    """Raise a RunError if the run in a folder has finished."""
    if (folder / RESULT).exists():
        raise RunError(
            "the run has already finished",
            where=str(folder),
            expected="an interrupted run",
            do=f"see its {RESULT}, or start a new run with its weights: raytrec train --warm-start "
            f"{quote_for_shell(folder)}",
        )


def find_interrupted_run(config: RunConfig, is_user_named: bool) -> Path | None:
    """Return the folder of an unfinished run that an earlier call of the same command started, or None.

    Args:
        config: Resolved configuration of a new run.
        is_user_named: True if the user has chosen the run's name or folder, which then identifies the run.
            Otherwise, the newest run with the same name (except date and time), settings and data is meant.
    """
    folders = (each for each in list_earlier_folders(config, is_user_named) if (each / "config.yaml").is_file())
    unfinished = (each for each in folders if not (each / RESULT).exists())
    return next((each for each in unfinished if is_user_named or _is_same_run(each, config)), None)


def list_earlier_folders(config: RunConfig, is_user_named: bool) -> list[Path]:
    """Return the folders that earlier calls of the same command may have created, newest first; some may not exist.

    Args:
        config: Resolved configuration of a new run or search.
        is_user_named: True if the user has chosen the name or folder, so that only config.run.dir is returned.
            Otherwise, the name ends with date and time.
    """
    folder, stem = Path(config.run.dir), config.run.name.rsplit("-", 2)[0]  # NAME-date-time
    return [folder] if is_user_named else sorted(folder.parent.glob(f"{stem}-*"), reverse=True)


def _is_same_run(folder: Path, config: RunConfig) -> bool:
    """Return True if a run's settings that must not change on resume, and the paths of its data, equal those given."""
    try:
        old = load_config(folder / "config.yaml", allow_code=True)  # the configuration is only compared
    except ConfigError:  # written by another version, or damaged
        return False
    data = all(getattr(old.data, part) == getattr(config.data, part) for part in ("train", "valid", "test"))
    return data and not _list_differences(old, config)


def record_data(folder: Path, datasets: dict[str, Dataset], contents: dict[str, list[FileIdentity]]) -> None:
    """Write identities and paths of the datasets' files to data.json in the run folder; ignore write errors.

    Args:
        folder: Run folder.
        datasets: Datasets by name.
        contents: Identities (sizes and hashes) of each dataset's files.
    """
    values: dict[str, Any] = {name: [asdict(each) for each in files] for name, files in contents.items()}
    values[FILES_KEY] = {name: d.listing.record() for name, d in datasets.items() if d.listing.files}
    with suppress(OSError):
        write_json(folder / DATA, values)


def check_same_data(
    folder: Path, root: str, schema: Schema, datasets: dict[str, Dataset], contents: dict[str, list[FileIdentity]]
) -> list[str]:
    """Check that a run that is resumed has the schema and the rows of data.train with which it was started.

    Args:
        folder: Run folder.
        root: Folder of the run's checkpoints.
        schema: Current schema.
        datasets: Current datasets by name.
        contents: Current identities (sizes and hashes) of each dataset's files.

    Returns:
        Warnings about changes in datasets other than data.train, and about files (of any dataset) that were rewritten
            with equal sizes, footers and samples; [] without a checkpoint.

    Raises:
        ConfigError: The schema has changed.
        DataError: There is a checkpoint, and data.train has changed.
        RunError, SchemaError: The schema in the run folder cannot be read, or is not a schema.
    """
    if _strip_statistics(schema) != _strip_statistics(load_stored_schema(folder)):
        file = folder / SCHEMA
        raise ConfigError(
            "the schema has changed since the run started",
            where=f"the current schema, compared with {file}",
            expected="the schema that the run started with",
            do=f"set data.schema={file}",
        )
    _, index = find_newest_checkpoint(root)
    if not index:
        return []  # the run starts from the beginning, so its data may change
    recorded, lines = _load_recorded_contents(folder), []
    if index["about"]["data"] != fingerprint(contents["train"]):
        changes = list_differences(recorded.get("train", []), contents["train"]) if recorded.get("train") else []
        raise DataError(
            "data.train has changed since the run was interrupted" + _format_list(changes),
            where=f"{datasets['train'].uri}; {root}",
            expected="the same files with the same content, because the saved position refers to "
            "their rows (moved files and copies are allowed)",
            do=f"restore the files, or start a new run with the weights: raytrec train --warm-start "
            f"{quote_for_shell(folder)}",
        )
    for name, old_files in recorded.items():
        new_files, key = contents.get(name, []), "eval.retrieval.items" if name == "items" else f"data.{name}"
        if new_files and (changes := list_differences(old_files, new_files)):
            lines.append(
                f"{key} has changed since the run started, so metrics before and after the change "
                f"cannot be compared{_format_list(changes)}"
            )
        elif rewritten := list_rewritten_files(old_files, new_files):
            lines.append(
                f"{key}: {format_count(len(rewritten), 'rewritten file')}, the first is {rewritten[0]}; sizes, "
                "footers and samples are unchanged, so rewritten files are treated as copies"
            )
    return lines


def _strip_statistics(schema: Schema) -> str:
    """Return a schema as YAML without its statistics, which do not affect results."""
    return schema.model_copy(update={"statistics": {}}).to_yaml()


def _load_recorded_contents(folder: Path) -> dict[str, list[FileIdentity]]:
    """Return dataset → identities of its files, as last recorded by `record_data`; {} without a valid record."""
    try:
        recorded = parse_json(read_bytes(folder / DATA))
        return {n: [FileIdentity(**values) for values in files] for n, files in recorded.items() if n != FILES_KEY}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def load_stored_schema(folder: Path) -> Schema:
    """Read the schema in a run folder.

    Raises:
        RunError: schema.yaml in the folder cannot be read.
        SchemaError: The file is not a schema.
    """
    file = folder / SCHEMA
    advice = {"expected": "the original file of the run", "do": "restore the file from a backup"}
    with convert_os_errors(f"cannot read {file.name} of the run", RunError, where=str(file), **advice):
        text = read_text(file)
    return Schema.parse_stored(text, str(file))


def _format_list(lines: list[str]) -> str:
    """Return up to 5 lines, and the number of others, each indented on a new line; "" without lines."""
    more = [f"… and {len(lines) - 5} more"] if len(lines) > 5 else []
    return "".join(f"\n  {line}" for line in lines[:5] + more)


def _list_differences(old_config: RunConfig, new_config: RunConfig) -> list[str]:
    """Return a line "  KEY: OLD → NEW" for each key that differs and must not change on resume."""
    old, new = (flatten(c.model_dump(by_alias=True, mode="json")) for c in (old_config, new_config))

    def is_fixed(key: str) -> bool:
        return any(fnmatchcase(key, f"{fixed}*") for fixed in FIXED_KEYS)  # plan.tables.*.dtype: of any table

    return [
        f"  {key}: {_show(old.get(key))} → {_show(new.get(key))}"
        for key in {**old, **new}
        if old.get(key) != new.get(key) and (is_fixed(key) or not key.startswith(FREE_KEYS))
    ]


def _show(value: Any) -> str:
    """Return a value of the configuration as text; None as YAML's null."""
    return "null" if value is None else str(value)


def check_warm_start(config: RunConfig, schema: Schema, text_ids: IdKinds) -> list[str]:
    """Return lines for the user about tables and dense parameters that are not loaded from warm_start.from.

    Each changed table has a line. With warm_start.dense=matching, one more line counts the dense parameters that are
    loaded, and names newly initialized ones.

    Args:
        config: Configuration of the new run.
        schema: Schema of the new run.
        text_ids: Kinds of ids in the training data of the new run.

    Raises:
        ConfigError, SchemaError: The ids of a loaded table were of another kind, the checkpoint differs in a way that
            warm_start.tables and warm_start.dense do not allow, or warm_start.optimizer is set and the checkpoint's
            optimizers differ.
        RunError, CheckpointError: The checkpoint is missing or damaged.
    """
    index = find(config.warm_start.from_)[1]
    about = index["about"]
    old_config, old_schema = load_config(about["config"], allow_code=True), parse_stored_schema(about)
    starts = resolve_warm_starts(config, old_schema, schema)
    lines = [start.note for start in starts.values() if start.note]
    new_features = {name for name, spec in schema.sparse.items() if starts[spec.table].policy == "new"}
    _check_id_kinds(config, schema, new_features, about.get("text_ids", {}), text_ids)
    if config.warm_start.dense == "exact":
        _check_dense(config, old_config, old_schema, schema)
    else:
        lines.append(_describe_matching_parameters(config, schema, index["tensors"]))
    if config.warm_start.optimizer:
        old, new = _list_optimizer_names(old_config, old_schema), _list_optimizer_names(config, schema)
        for part, name in new.items():
            if old.get(part, name) != name:
                raise ConfigError(
                    f"the optimizer of {part} is {name}, but the checkpoint contains the state of {old[part]}",
                    where=f"warm_start.from={config.warm_start.from_}",
                    expected="the checkpoint's optimizers",
                    do="set warm_start.optimizer=false, or use the checkpoint's optimizers",
                )
    return lines


def _check_id_kinds(config: RunConfig, schema: Schema, new_features: set[str], old: IdKinds, new: IdKinds) -> None:
    """Check that the ids of features whose tables are loaded are text only if they were text in the checkpoint's run.

    Inputs of transforms are checked only if there are no `new_features`, whose tables get their initial values.

    Raises:
        ConfigError: The ids of a feature, or the inputs of transforms, are of another kind.
    """
    for name, is_text in old.items():
        is_loaded = name not in new_features if name in schema.sparse else not new_features
        if is_loaded and new.get(name, is_text) != is_text:
            raise ConfigError(
                f"{describe_kind(name, new[name])}, but {'text' if is_text else 'numbers'} in the checkpoint",
                where=f"warm_start.from={config.warm_start.from_}",
                expected=ONE_KIND,
                do="use data.transforms: {do: cast, …}, or initialize the tables with warm_start.tables",
            )


def _list_optimizer_names(config: RunConfig, schema: Schema) -> dict[str, str]:
    """Return part of the model ("the dense layers" or "table NAME") → name of its optimizer."""
    of_tables = {f"table {table}": each.name for table, each in resolve_optimizers(config, schema).items()}
    return {"the dense layers": config.optim.dense.name, **of_tables}


def _check_dense(config: RunConfig, old_config: RunConfig, old_schema: Schema, schema: Schema) -> None:
    """Check that all dense parameters of a checkpoint fit (warm_start.dense=exact).

    Raises:
        ConfigError: A key of the section model, except dropout, differs from the checkpoint's.
        SchemaError: The labels, dense columns, or names or tables of sparse features differ.
    """
    where, hint = f"warm_start.from={config.warm_start.from_}", ", or warm_start.dense=matching"
    old_model = old_config.model.model_dump()
    for key, new in config.model.model_dump().items():
        old = old_model.get(key)
        if old != new and key != "dropout":
            raise ConfigError(
                f"model.{key} is {_show(new)}, but the checkpoint has {_show(old)}",
                where=where,
                expected="the checkpoint's model",
                do=f"set model.{key}={_show(old).replace(' ', '')}" + hint,
            )
    old_parts = _select_dense_parts(old_schema)
    for part, new in _select_dense_parts(schema).items():
        if new != (old := old_parts[part]):
            at = next(slice(i, i + 1) for i in range(len(new) + 1) if new[i : i + 1] != old[i : i + 1])
            raise SchemaError(
                f"entry {at.stop} of {part} is {new[at] or 'missing'}; the checkpoint's schema has {old[at] or 'none'}",
                where=where,
                expected="the labels, dense columns and sparse features of the checkpoint's schema",
                do="train with the checkpoint's schema" + hint,
            )


def _describe_matching_parameters(config: RunConfig, schema: Schema, saved: dict[str, Any]) -> str:
    """Return a line with the number of dense parameters that are loaded, and names of newly initialized ones.

    `saved` is the entry "tensors" of the checkpoint's index.
    """
    try:
        import torch  # takes seconds, so other runs do not import it in the driver

        from raytrec.embeddings.pooling import find_table_name
        from raytrec.worker.build import build_unsharded

        with torch.random.fork_rng(devices=[]):
            values = build_unsharded(config, schema, torch.device("cpu")).state_dict()
        shapes = {fqn: list(value.shape) for fqn, value in values.items() if find_table_name(fqn) is None}
    except Exception as error:  # check_fit or a worker reports the cause; the line is only information
        return f"the parameters that warm_start.dense=matching loads are unknown: {get_first_line(error)}"
    initial = [fqn for fqn, shape in shapes.items() if saved.get(f"dense/{fqn}/value", {}).get("shape") != shape]
    if not initial:
        return f"warm_start.dense=matching loads all {len(shapes)} dense parameters and buffers"
    names, more = ", ".join(initial[:MAX_SHOWN_PARAMETERS]), len(initial) - MAX_SHOWN_PARAMETERS
    return (
        f"warm_start.dense=matching loads {len(shapes) - len(initial)} of {len(shapes)} dense parameters and buffers; "
        f"newly initialized: {names}{f' and {more} more' if more > 0 else ''}"
    )


def _select_dense_parts(schema: Schema) -> dict[str, list[str]]:
    """Return the parts of a schema that determine the shapes and the meaning of dense weights."""
    sparse = [f"{name} → {spec.table}" for name, spec in schema.sparse.items()]
    return {"labels": schema.labels, "dense": schema.dense, "sparse": sparse}

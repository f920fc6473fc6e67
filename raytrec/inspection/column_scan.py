"""Every column of a folder of Parquet: which type it has in which file, and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from raytrec.common.errors import DataError
from raytrec.common.storage import open_filesystem
from raytrec.inspection.column_stats import NUMBERS, ColumnStats


@dataclass
class Scan:
    """What was looked at.

    Attributes:
        rows: of the training data that were looked at; whole: whether these, and the others', are all.
        also: name → place of validation and test data that was looked at.
        not_seen: name → why it was not.
        folders: keys of the folders key=value that all files of the training data are in.
    """

    columns: list[ColumnStats]
    rows: int
    whole: bool
    also: dict[str, str]
    not_seen: dict[str, str]
    folders: list[str]


def scan_columns(
    uri: str,
    max_rows: int | None,
    also: dict[str, str] | None = None,
    is_label: Callable[[str], bool] = lambda name: False,
) -> Scan:
    """Statistics of every column.

    Args:
        also: name → place of validation and test data; what has no Parquet, or no labels, is none.
        is_label: whether a column of this name is one.

    Raises:
        DataError: nothing there, no rows, or a file that is not whole.
    """
    footers: dict[str | None, dict] = {None: _footers(uri)}
    not_seen: dict[str, str] = {}
    labels = {name for name in _names(footers[None]) if is_label(name)}
    for part, place in (also or {}).items():
        try:
            footers[part] = _footers(place)
        except DataError as error:
            not_seen[part] = error.what
            continue
        if missing := labels - _names(footers[part]):
            not_seen[part] = f"it has no column {', '.join(sorted(missing))}"
            del footers[part]
    columns = _columns({path: footer for files in footers.values() for path, footer in files.items()})
    groups = {part: _groups(files) for part, files in footers.items()}
    if not sum(rows for *_, rows in groups[None]):
        raise DataError(
            "there are no rows", where=uri, expected=f"rows in its {len(footers[None])} Parquet files"
        )
    seen = {part: place for part, place in (also or {}).items() if part in footers}
    for column in columns:
        column.elsewhere = {part: replace(column, elsewhere={}, few=None) for part in seen}
    chosen = {part: _spread(of, max_rows) for part, of in groups.items()}
    for part, path, index in _tracked(chosen):
        _add_group([c if part is None else c.elsewhere[part] for c in columns], columns, path, index)
    rows = sum(rows for *_, rows in chosen[None])
    return Scan(columns, rows, chosen == groups, seen, not_seen, _folders(footers[None]))


def _footers(place: str) -> dict:
    """file → footer."""
    from raytrec.data.fragments import list_files, read_footer

    return {path: read_footer(path) for path in list_files(place, "inspect")}


def _folders(footers: dict) -> list[str]:
    from raytrec.data.carried import in_folders

    return sorted(set.intersection(*(set(in_folders(path)) for path in footers)))


def _names(footers: dict) -> set[str]:
    """Columns that all files have."""
    from raytrec.data import nested

    return set.intersection(*(set(nested.leaves(f.schema.to_arrow_schema())) for f in footers.values()))


def _groups(footers: dict) -> list[tuple[str, int, int]]:
    """(file, row group, rows)."""
    return [(p, i, f.row_group(i).num_rows) for p, f in footers.items() for i in range(f.num_row_groups)]


def _spread(groups: list, max_rows: int | None) -> list:
    """Row groups, evenly spread, that hold about max_rows rows."""
    total = sum(rows for *_, rows in groups)
    if max_rows is None or max_rows >= total:
        return groups
    count = max(1, round(len(groups) * max_rows / total))
    return [groups[i * len(groups) // count] for i in range(count)]


def _tracked(chosen: dict) -> Iterator[tuple[str | None, str, int]]:
    """(part, file, row group), with a bar on terminals."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    work = [(part, path, index) for part, groups in chosen.items() for path, index, _ in groups]
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        yield from bar.track(work, description="reading")


def _add_group(targets: list[ColumnStats], columns: list[ColumnStats], path: str, index: int) -> None:
    """Adds a row group to the statistics.

    Args:
        columns: those that are told what is wrong.

    Raises:
        DataError: no column can be read.
    """
    wanted = [i for i, c in enumerate(columns) if not c.trouble]
    for i, data in zip(wanted, _read(path, index, [columns[i].name for i in wanted]), strict=True):
        try:
            if isinstance(data, Exception):
                raise data
            targets[i].add(data)
        except Exception as error:  # whatever it is: one column must not stop the look at the others
            first = (str(error).splitlines() or [type(error).__name__])[0]
            columns[i].trouble = f"cannot be read in {path}, row group {index}: {first}"


def _read(path: str, index: int, names: list[str]) -> list:
    """A row group's columns, or for each what is wrong with it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from raytrec.data.nested import pick, to_read

    def read(reader, some: list[str]) -> list:
        return pick(reader.read_row_group(index, columns=to_read(reader.schema_arrow, some)), some).columns

    try:
        filesystem, inner = open_filesystem(path)
        with filesystem.open_input_file(inner) as file:
            reader = pq.ParquetFile(file)
            try:
                return read(reader, names)
            except (pa.ArrowException, OSError, KeyError):
                found = [_attempt(read, reader, name) for name in names]
        if not all(isinstance(data, Exception) for data in found):
            return found
        raise found[0]
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the row group: {(str(error).splitlines() or [type(error).__name__])[0]}",
            where=f"{path}, row group {index}",
            expected="a whole Parquet file",
            do="write or copy the file again",
        ) from None


def _attempt(read, reader, name: str):
    try:
        return read(reader, [name])[0]
    except Exception as error:
        return error


def _columns(footers: dict) -> list[ColumnStats]:
    """Every column (of structs: their fields) with the type that all files agree on."""
    from raytrec.data import nested

    schemas = {path: footer.schema.to_arrow_schema() for path, footer in footers.items()}
    names = dict.fromkeys(name for schema in schemas.values() for name in nested.leaves(schema))
    return [_column(name, schemas) for name in names]


def _column(name: str, schemas: dict) -> ColumnStats:
    from raytrec.data import nested

    types, missing, twice = {}, [], []
    for path, schema in schemas.items():
        try:
            place = nested.find(schema, name)
        except nested.Ambiguous:
            twice.append(path)
            first = next(iter(schema.get_all_field_indices(name)), None)
            types.setdefault("unknown" if first is None else schema.field(first).type, path)
            continue
        if place is None:
            missing.append(path)
        else:
            types.setdefault(nested.type_at(schema, place), path)
    base, is_list, mixed = _agreed([] if twice else list(types))
    known = next((t for t in types if twice or _base(t)[0] != "null"), next(iter(types)))
    column = ColumnStats(name, str(known), base, is_list, {str(t): p for t, p in types.items()}, mixed)
    if twice:
        column.trouble = f"there is more than one column of this name in {_and_more(twice)}"
    elif missing:
        column.trouble = f"there is no such column in {_and_more(missing)}"
    elif base == "other" and len(types) > 1:
        column.trouble = f"its type differs: {'; '.join(f'{t} in {p}' for t, p in column.types.items())}"
    elif base == "other":
        column.trouble = f"type {known} is not supported"
    return column


def _and_more(paths: list[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1:,} other files" if len(paths) > 1 else "")


def _agreed(types: list) -> tuple[str, bool, bool]:
    """(base, whether a list, whether values have to be cast) of a column with these types in its files."""
    kinds = [_base(kind) for kind in types]
    bases = {base for base, _ in kinds} - {"null"}
    is_list = any(listed for _, listed in kinds)
    if len(bases) <= 1:
        return (next(iter(bases), "null"), is_list, False)
    if bases <= NUMBERS:
        return ("integer" if bases <= {"integer", "bool"} else "float"), is_list, True
    if bases <= NUMBERS | {"text"}:
        return "text", is_list, True
    return "other", is_list, False


def _base(kind) -> tuple[str, bool]:
    """(base, whether a list) of an Arrow type."""
    import pyarrow.types as t

    from raytrec.data.kinds import is_list, is_text, plain, value_type

    value, listed = value_type(kind), is_list(plain(kind))
    tests = {
        "integer": t.is_integer,
        "float": t.is_floating,
        "bool": t.is_boolean,
        "decimal": t.is_decimal,
        "text": is_text,
        "null": t.is_null,
        "time": lambda k: t.is_temporal(k) and not t.is_interval(k),
    }
    return next((base for base, fits in tests.items() if fits(value)), "other"), listed

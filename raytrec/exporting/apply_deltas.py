"""Implementation of `raytrec deltas apply`, which applies deltas to an export."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch
from pyarrow import fs

from raytrec.common.errors import ConfigError, RunError, convert_os_errors
from raytrec.common.output_folder import compute_binding
from raytrec.common.storage import make_absolute, open_filesystem, quote_for_shell
from raytrec.deltas.apply import Delta, read_delta, refuse_unusable
from raytrec.deltas.chain import Position, find_position, read_next
from raytrec.driver.console import Result, RunConsole
from raytrec.exporting.export import encode_arrow, encode_ids
from raytrec.exporting.export_folder import ExportFolder
from raytrec.exporting.trained_model import PIECE_BYTES
from raytrec.scoring.load import check_files, open_export, read_ids, refuse_code, select_files
from raytrec.scoring.lookups import IdRows
from raytrec.scoring.manifest import GOLDEN, ONNX_FILE, Manifest, StackEntry, read_manifest
from raytrec.scoring.program_archive import load_program, replace_weights
from raytrec.scoring.stored_tables import ALIGNMENT, PRECISIONS, encode_rows, place_tables


def apply_deltas(export: str, deltas: str, out: str, *, to: int | None = None, allow_code: bool = False) -> Result:
    """Apply a run's deltas to an export, and write the result as a new export of a later step.

    Neither the run folder nor its data is needed. The files of the export are copied to a temporary folder (TMPDIR),
    in which the deltas are applied one after another. The new export contains no ONNX model.

    Args:
        export: Export of a checkpoint; local, s3:// or gs://. Its tables may have any precision.
        deltas: Folder of deltas of the same run (export.deltas.to).
        out: Output folder; local, s3:// or gs://.
        to: Number of the last delta to apply; default: the newest one. With the delta of the export itself, the result
            is a copy.
        allow_code: True to allow transforms of the export to name code.

    Returns:
        Result with the metrics version, step, deltas (number of applied deltas), name (of the run) and seconds.

    Raises:
        RunError: The export or a delta cannot be used, not exactly one delta leads to the step of the export, a file
            cannot be written, the folder of deltas cannot be read, or another process is writing to `out`.
        ConfigError: `out` contains other files, there is no delta `to`, or a transform of the export names code and
            `allow_code` is False.
        DataError: A path is not valid, or a store cannot be reached.
    """
    began = perf_counter()
    export, deltas, out = (make_absolute(str(each)) for each in (export, deltas, out))
    base = read_manifest(export)
    refuse_code(base, export, allow_code)
    with convert_os_errors("cannot read the folder of deltas", where=deltas):
        positions = _read_chain(deltas, find_position(deltas, export, base.source), to)
    binding = compute_binding(base.checksum, positions[-1].checksum)
    target = ExportFolder(out, "raytrec deltas apply", binding, compute_binding(base.checksum, to))
    with RunConsole(base.source.run) as console, target.folder.hold():
        if (manifest := target.complete()) is None:
            with TemporaryDirectory(prefix="raytrec-deltas-") as work:
                console.phase("copying the export")
                _copy_files(export, base, Path(work))
                manifest = _write_export(target, _PatchedExport(Path(work), base), deltas, positions[1:], console)
    step, count = manifest.source.step, len(positions) - 1
    metrics = {"version": manifest.version, "step": step, "deltas": count, "name": base.source.run}
    metrics["seconds"] = round(perf_counter() - began, 3)
    pairs = [("version", manifest.version), ("step", f"{step:,}"), ("applied deltas", f"{count:,}")]
    return Result(metrics, out, [f"export       {out}", f"serve with   raytrec serve {quote_for_shell(out)}"], pairs)


def _read_chain(folder: str, start: Position, to: int | None) -> list[Position]:
    """Return the position `start`, followed by the position after each delta to apply.

    Raises:
        ConfigError: Delta `to` does not exist, or is older than `start`.
        RunError: A manifest cannot be used.
    """
    positions = [start]
    while (to is None or positions[-1].number < to) and (following := read_next(folder, positions[-1])):
        positions.append(following)
    if to is not None and positions[-1].number != to:
        while following := read_next(folder, positions[-1]):
            positions.append(following)
        first, last = start.number, positions[-1].number
        what = f"there is no delta {to} after delta {first} of the export"
        expected = f"a number from {first} to {last}" if last > first else f"{first}, the newest delta"
        raise ConfigError(what, where="--to", expected=expected)
    return positions


def _copy_files(export: str, manifest: Manifest, work: Path) -> None:
    filesystem, path = open_filesystem(export)
    copied = select_files(manifest, manifest.files.keys() - {ONNX_FILE})
    for name, entry in copied.files.items():
        size, do = entry.bytes, "check the export, and set TMPDIR to a folder with enough space"
        with convert_os_errors(f"{name} cannot be copied to a temporary folder", where=export, do=do):
            info = filesystem.get_file_info(f"{path}/{name}")
            if not info.is_file or info.size != size:
                fault = f"has {info.size:,} bytes" if info.is_file else "is missing"
                expected = f"a file of {size:,} bytes"
                do = "restore the file, or write the export again"
                raise RunError(f"the export is damaged: {name} {fault}", where=export, expected=expected, do=do)
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            fs.copy_files(f"{path}/{name}", str(work / name), filesystem, fs.LocalFileSystem())
    check_files(work, copied, True, export)


class _PatchedExport:
    """Local copy of an export, to which deltas are applied.

    Rows are changed in the table files. New ids and weights are in memory until `finish` writes them.

    Args:
        folder: Local folder of the copy.
        manifest: Manifest of the original export.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.programs = {name: load_program(folder / e.file, len(e.inputs)) for name, e in manifest.programs.items()}
        self.weights = {name: value for each in self.programs.values() for name, value in each.state_dict().items()}
        self.ids: dict[str, IdRows] = {n: read_ids(folder / file, manifest, n) for n, file in manifest.ids.items()}

    def apply(self, source: str, delta: Delta) -> None:
        """Apply a delta, or raise RunError if it does not fit the export; `source` is the folder of deltas."""
        with refuse_unusable(source, delta.position):
            tables = place_tables(self.manifest, self.manifest.stacks)
            for name, changes in delta.rows.items():
                stack, rows = tables[name].stack, changes.rows.numpy() + tables[name].first_row
                self._write_rows(stack, rows, encode_rows(name, changes, PRECISIONS[stack.precision]).numpy())
            for name, each in delta.ids.items():
                self.ids[name] = self.ids[name].replace(each.listed, each.ids, each.rows)
            self.weights = delta.dense

    def _write_rows(self, stack: StackEntry, rows: np.ndarray, stored: np.ndarray) -> None:
        for number, file in enumerate(stack.files):
            inside = rows // stack.block_rows == number
            if inside.any():  # rows are written to a mapped file, so that the table need not fit into memory
                block = np.memmap(self.folder / file, stored.dtype, "r+", offset=ALIGNMENT)
                block.reshape(-1, stored.shape[1])[rows[inside] - number * stack.block_rows] = stored[inside]

    def finish(self) -> None:
        """Write the programs with the new weights, the managed ids, and the golden rows with their new scores."""
        for name, entry in self.manifest.programs.items():
            file = self.folder / entry.file
            file.write_bytes(replace_weights(file.read_bytes(), self.programs[name], self.weights))
        for table, ids_file in self.manifest.ids.items():
            (self.folder / ids_file).write_bytes(encode_ids(self.ids[table]))
        scorer = open_export(self.folder, self.manifest)
        golden = scorer.golden
        if len(golden):
            scores = scorer.as_table(scorer.score([scorer.reader.read(golden)]))
            for column in scores.column_names:
                values = scores[column].cast(golden.schema.field(column).type)
                golden = golden.set_column(golden.column_names.index(column), column, values)
        (self.folder / GOLDEN).write_bytes(encode_arrow(golden))


def _write_export(
    target: ExportFolder, patched: _PatchedExport, deltas: str, positions: Sequence[Position], console: RunConsole
) -> Manifest:
    """Apply deltas, write all files of the new export (the manifest last), and return the manifest."""
    base, source = patched.manifest, patched.manifest.source
    for position in positions:
        console.phase(f"applying delta {position.number}, step {position.manifest.step:,}", always=False)
        patched.apply(deltas, read_delta(deltas, position, base.data_schema, patched.weights))
    patched.finish()
    for name in sorted(base.files.keys() - {ONNX_FILE}):
        with (patched.folder / name).open("rb") as stream:
            target.write(name, iter(partial(stream.read, PIECE_BYTES), b""))
    if positions:
        last = positions[-1]
        about = {"checkpoint": f"delta-{last.number}", "checkpoint_id": last.checksum, "step": last.manifest.step}
        source = source.model_copy(update=about | {"torch": torch.__version__})
    made = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = base.model_copy(update={"made": made, "source": source, "metrics": {}, "binding": target.claim.binding})
    target.commit(manifest)
    return manifest

"""Functions that write, read and corrupt checkpoints. Tensors are read without DCP and raytrec's reader."""

import json
import zlib
from math import prod
from pathlib import Path

import torch


def save_checkpoint(root, step, number, **section):
    """Save a Step as the checkpoint of step `number` and return its folder; `section` are checkpoint keys."""
    from raytrec.checkpoint.save import CheckpointWriter
    from raytrec.checkpoint.state import LogicalState
    from raytrec.config.training import CheckpointSection

    saver = CheckpointWriter(str(root), CheckpointSection(**section))
    saver.save(number, LogicalState(step.model, step.optimizer).tensors(), {})
    saved = saver.collect_outcome()
    saver.close()
    if saved.error:
        raise saved.error
    return saved.folder


def restore_newest(root, step):
    """Restore the newest checkpoint into a Step and return its LogicalState. The checkpoint must be valid."""
    from raytrec.checkpoint.restore import restore
    from raytrec.checkpoint.state import LogicalState

    state = LogicalState(step.model, step.optimizer)
    found = restore(str(root), state)
    assert found.folder and not found.skip_reasons
    return state


def newest_checkpoint(run):
    """Return the folder of the newest checkpoint with an index."""
    return sorted(p.parent for p in (Path(run) / "checkpoints").glob("step-*/checkpoint.json"))[-1]


def read_about(folder):
    return json.loads((Path(folder) / "checkpoint.json").read_text())["about"]


def progress_values(step, **changes):
    """Return the progress of a run in the format of `read_about` in the checkpoint index."""
    begun = {"step": step, "rows": 128 * step, "trained": 128.0 * step, "nan_steps": 0, "window": {}}
    times = {"seconds": 1.5, "timed_rows": 128 * step, "evaluation": None, "early_stopping": {}}
    return begun | times | changes


def write_index_only(root, step, **about):
    """Write a checkpoint that consists only of an index and return its folder."""
    from raytrec.checkpoint.files import get_step_folder
    from raytrec.checkpoint.index import write_index

    folder = get_step_folder(str(root), step)
    Path(folder).mkdir(parents=True)
    about = {"progress": progress_values(step), "data": "", "config": {}, "schema": ""} | about
    write_index(folder, {"attempt": f"a{step}", "block_bytes": 1 << 22, "tensors": {}, "about": about})
    return folder


def read_tensors(folder):
    """Return {name: tensor} of a checkpoint folder. Check that the chunks cover each value exactly once."""
    folder, out = Path(folder), {}
    for name, entry in json.loads((folder / "checkpoint.json").read_text())["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        values, seen = torch.zeros(entry["shape"], dtype=dtype), torch.zeros(entry["shape"], dtype=torch.int8)
        for chunk in entry["chunks"]:
            count = prod(chunk["sizes"])
            raw = bytearray((folder / chunk["file"]).read_bytes()[chunk["start"] :][: count * dtype.itemsize])
            piece = torch.frombuffer(raw, dtype=dtype) if count else torch.zeros(0, dtype=dtype)
            place = tuple(slice(o, o + s) for o, s in zip(chunk["offsets"], chunk["sizes"], strict=True))
            values[place] = piece.reshape(chunk["sizes"])
            seen[place] += 1
        assert (seen == 1).all(), f"the chunks of {name} overlap or do not cover all values"
        out[name] = values
    return out


def differing_tensors(one, other):
    """Return the names of tensors that are not bitwise equal in two checkpoints."""
    one, other = read_tensors(one), read_tensors(other)
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def flip_lowest_bit(file, place):
    """Flip the lowest bit of the byte at offset `place` of a file."""
    content = bytearray(Path(file).read_bytes())
    content[place] ^= 1
    Path(file).write_bytes(content)


def set_first_value_infinite(folder, name):
    """Set the first value of a float32 tensor to infinity and update the checksum."""
    from raytrec.checkpoint.index import read_index, write_index

    index = read_index(str(folder))
    chunk = index["tensors"][name]["chunks"][0]
    size = min(4 * prod(chunk["sizes"]), index["block_bytes"])
    with open(Path(folder) / chunk["file"], "r+b") as file:
        file.seek(chunk["start"])
        block = torch.tensor([float("inf")]).numpy().tobytes() + file.read(size)[4:]
        file.seek(chunk["start"])
        file.write(block)
    chunk["crc32"][0] = zlib.crc32(block)
    write_index(str(folder), {k: v for k, v in index.items() if k not in ("format", "sha256")})

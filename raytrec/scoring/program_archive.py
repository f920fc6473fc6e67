"""Archives of torch.export (.pt2), whose content is checked before torch loads them.

torch.export.load can run code from an archive: it unpickles entries, evaluates symbolic expressions, loads
libraries, and writes names into Python source. Archives are therefore read by a strict parser, which accepts only
content that `raytrec export` writes. torch then loads a new archive that consists of the checked parts.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch.export.pt2_archive import PT2ArchiveWriter
from torch.fx.graph import CodeGen

from raytrec.common.errors import RunError, get_first_line
from raytrec.common.formatting import as_dict, format_count
from raytrec.common.reading import UnreadableError, parse_json
from raytrec.compat.torch_ import copy_modules, load_archive
from raytrec.scoring.operators import (
    IDENTIFIER_PATTERN,
    MODEL,
    DisallowedContent,
    add_size_checks,
    canonicalize_expression,
    check_arguments,
    is_operator,
)

SAMPLE_INPUTS_ENTRY = "data/sample_inputs/model.pt"
WEIGHTS_CONFIG, WEIGHT_PREFIX = "data/weights/model_weights_config.json", "data/weights/weight_"
# Entry that describes tensors → pattern of the names of the tensors' entries in the same folder.
TENSORS = {
    WEIGHTS_CONFIG: re.compile(r"weight_\d+"),
    "data/constants/model_constants_config.json": re.compile(r"tensor_\d+"),
}
FIXED_ENTRIES = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little"}
WRITTEN_BY_TORCH = {".data/version", ".data/serialization_id"}

# Keys of model.json whose values are not needed to run the program → value that replaces them.
DROPPED_KEYS = {"metadata": {}, "guards_code": [], "treespec_namedtuple_fields": {}}
ARGUMENT_KINDS = {
    *("as_tensor", "as_tensors", "as_optional_tensor", "as_optional_tensors", "as_nested_tensors", "as_none"),
    *("as_int", "as_ints", "as_int_lists", "as_float", "as_floats", "as_bool", "as_bools", "as_string"),
    *("as_sym_int", "as_sym_ints", "as_sym_bool", "as_sym_bools", "as_sym_float", "as_sym_floats"),
    *("as_name", "as_expr", "as_device", "as_layout", "as_memory_format", "as_scalar_type", "as_graph"),
}
QUALIFIED_NAME_PATTERN = re.compile(r"[\w. -]*")  # torch writes these into string literals
FIELD_PATTERNS = {
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name", "fqn"), QUALIFIED_NAME_PATTERN),
    **dict.fromkeys(("as_float", "as_floats"), re.compile("-?Infinity|NaN")),
    "as_string": re.compile(r"[\w., >-]*"),  # options of operators, such as an equation of einsum
    "torch_version": re.compile(r"[\w.+]*"),
    "type": re.compile("cpu"),  # type of a device
}
# (type, context) of allowed nodes in the structure of arguments: a tensor, a tuple, and an empty mapping.
ARGUMENT_STRUCTURES = {(None, None), ("builtins.tuple", "null"), ("builtins.dict", "[]")}


# All entries of an archive except weights → program that was loaded from these entries and is still in memory.
_loaded: WeakValueDictionary[tuple, torch.fx.GraphModule] = WeakValueDictionary()


def load_program(file: Path, inputs: int) -> torch.fx.GraphModule:
    """Load a program written by `raytrec export`.

    If a program in memory differs only in its weights, as after retraining, the new program shares the code of that
    program. This reduces the load time, during which the GIL is held, to about 1 %.

    Args:
        file: File of the program.
        inputs: Number of tensors that the program takes.

    Raises:
        RunError: The file is damaged or contains something that `raytrec export` does not write, or the program
            takes a different number of tensors.
    """
    try:
        content = file.read_bytes()
        entries = _read_entries(content)
        weights = {name: entries.pop(name) for name in list(entries) if name.startswith(WEIGHT_PREFIX)}
        key = (*weights, *sorted((name, entries[name]) for name in entries.keys() - WRITTEN_BY_TORCH))
        if loaded := _loaded.get(key):
            module = _replace_weights(loaded, entries, weights)
        else:
            program = load_archive(io.BytesIO(sanitize_archive(content)))
            module = program.module(check_guards=False)  # guards take ten times as long as a small model
            module.graph.set_codegen(CodeGen())  # torch's code generator would flatten a tree of inputs at each call
            add_size_checks(module)
            if all(weights.values()):  # an empty entry belongs to a tensor without values, which torch creates itself
                _loaded[key] = module
    except DisallowedContent as error:
        raise RunError(
            f"the program contains {error}",
            where=str(file),
            expected="a graph and tensors written by `raytrec export`",
            do="do not use this export; export the model again or obtain an export from a trusted source",
        ) from None
    except Exception as error:  # torch's exceptions have no common base
        what, do = f"the program cannot be read: {get_first_line(error)}", "copy or export the model again"
        raise RunError(what, where=str(file), expected="an archive written by `raytrec export`", do=do) from None
    if (count := sum(node.op == "placeholder" for node in module.graph.nodes)) != inputs:
        what, expected = f"the program takes {format_count(count, 'tensor')}", f"{inputs}, as in the manifest"
        raise RunError(what, where=str(file), expected=expected, do="copy or export the model again")
    return module


def _replace_weights(program: torch.fx.GraphModule, entries: dict[str, bytes], weights: dict[str, bytes]) -> Any:
    """Return a copy of a program with other weights; code and constants are shared.

    Args:
        program: Program in memory.
        entries: Entries of the new program's archive, without weights. They equal those of `program`, except the
            entries that torch writes itself (WRITTEN_BY_TORCH).
        weights: Entries with the weights of the new program.
    """
    config, state = json.loads(entries[WEIGHTS_CONFIG])["config"], program.state_dict()
    # As in torch, weights of one entry share memory. clone() aligns the memory as torch does, for bitwise equal scores.
    storages = {name: torch.frombuffer(bytearray(value), dtype=torch.uint8).clone() for name, value in weights.items()}
    for name, old in state.items():
        values = storages[f"data/weights/{config[name]['path_name']}"].view(old.dtype)
        state[name] = values.as_strided(old.size(), old.stride(), old.storage_offset())
    module = copy_modules(program)
    module.load_state_dict(state, assign=True)
    return module


def replace_weights(content: bytes, program: torch.fx.GraphModule, weights: Mapping[str, torch.Tensor]) -> bytes:
    """Return the content of a program's archive in which the weights have other values.

    Args:
        content: Content of the program's archive.
        program: Program that `load_program` has loaded from the archive.
        weights: New values of all weights by name, with the shapes and dtypes of the program's weights.
    """
    entries = _read_entries(content)
    config = json.loads(entries[WEIGHTS_CONFIG])["config"]
    for name, old in program.state_dict().items():
        entry = f"data/weights/{config[name]['path_name']}"
        if values := bytearray(entries[entry]):
            storage = torch.frombuffer(values, dtype=old.dtype)
            storage.as_strided(old.size(), old.stride(), old.storage_offset()).copy_(weights[name])
        entries[entry] = bytes(values)
    return _sanitize_entries(entries)


def sanitize_archive(content: bytes) -> bytes:
    """Return the content of a torch.export archive, rebuilt from its checked parts without metadata.

    Raises:
        DisallowedContent: The archive contains something that `raytrec export` does not write.
        BadZipFile, LookupError, TypeError, ValueError: The archive is damaged.
    """
    return _sanitize_entries(_read_entries(content))


def _sanitize_entries(entries: dict[str, bytes]) -> bytes:
    """Return an archive of checked entries, as `sanitize_archive` does; the entries are removed from the mapping."""
    parts: dict[str, bytes] = {}
    for name, pattern in TENSORS.items():
        config = _sanitize_tensors(_parse_entry(entries, name), pattern)
        parts[name] = json.dumps(config).encode()
        for tensor in config["config"].values():
            entry_name = f"{name.rpartition('/')[0]}/{tensor['path_name']}"
            if entry_name not in parts:  # tensors without values share an empty entry
                parts[entry_name] = _pop_entry(entries, entry_name)
            if not parts[entry_name] and {"as_int": 0} not in tensor["tensor_meta"]["sizes"]:
                raise BadZipFile(f"{entry_name} is empty")  # torch would load zeros
    parts[MODEL] = json.dumps(_sanitize_value(_parse_entry(entries, MODEL), "")).encode()
    parts[SAMPLE_INPUTS_ENTRY] = _pop_entry(entries, SAMPLE_INPUTS_ENTRY)
    if parts[SAMPLE_INPUTS_ENTRY]:
        raise DisallowedContent("pickled sample inputs")
    for name, value in FIXED_ENTRIES.items():
        if (parts.setdefault(name, _pop_entry(entries, name))) != value:
            raise DisallowedContent(f"an entry {name} with a value other than {value.decode()}")
    if unknown := sorted(set(entries) - WRITTEN_BY_TORCH):
        raise DisallowedContent(f"the unexpected entry {unknown[0]!r}")
    buffer = io.BytesIO()
    with PT2ArchiveWriter(buffer) as writer:
        for name, value in parts.items():
            writer.write_bytes(name, value)
    return buffer.getvalue()


def _read_entries(content: bytes) -> dict[str, bytes]:
    """Return the entries of an archive by name, without the name of its root folder; errors as `sanitize_archive`."""
    entries: dict[str, bytes] = {}
    with ZipFile(io.BytesIO(content)) as archive:
        infos = archive.infolist()
        if sum(info.file_size for info in infos) > len(content):
            raise BadZipFile("entries of the archive overlap")
        for info in infos:
            root, _, name = info.filename.partition("/")
            if info.compress_type != ZIP_STORED or info.flag_bits & 1:
                raise DisallowedContent(f"the {'encrypted' if info.flag_bits & 1 else 'compressed'} entry {name!r}")
            if name in entries or not name or root != infos[0].filename.partition("/")[0]:
                raise DisallowedContent(f"the duplicate or misplaced entry {info.filename!r}")
            entries[name] = archive.read(info)
    return entries


def _pop_entry(entries: dict[str, bytes], name: str) -> bytes:
    if name not in entries:
        raise BadZipFile(f"{name} is missing")
    return entries.pop(name)


def _parse_entry(entries: dict[str, bytes], name: str) -> dict[str, Any]:
    try:
        return as_dict(parse_json(_pop_entry(entries, name)))
    except (UnreadableError, RecursionError) as error:
        raise BadZipFile(f"{name}: {error}") from None


def _sanitize_tensors(config: dict[str, Any], pattern: re.Pattern) -> dict[str, Any]:
    """Return a description of tensors; raise DisallowedContent for invalid names, pickles, or files of other names.

    The description is changed in place. `pattern` is the pattern of file names.
    """
    tensors = as_dict(config.get("config"))
    for name, value in tensors.items():
        tensor = as_dict(value)
        path = str(tensor.get("path_name"))
        if not QUALIFIED_NAME_PATTERN.fullmatch(name):
            raise DisallowedContent(f"a tensor with the invalid name {name!r}")
        if tensor.get("use_pickle") is not False or not pattern.fullmatch(path):
            form = "as a pickle" if pattern.fullmatch(path) else f"in the unexpected file {path!r}"
            raise DisallowedContent(f"the tensor {name} {form}")
        tensors[name] = tensor | {"tensor_meta": _sanitize_value(tensor.get("tensor_meta"), "")}
    return {"config": tensors}


def _sanitize_value(value: Any, key: str) -> Any:
    """Check a value of model.json, and return the value without the content of DROPPED_KEYS.

    A string must be an operator, a symbolic expression, a structure of arguments, or match the pattern of its key.
    Keys and the arguments of operators are also checked. Numbers, truth values and null are allowed.

    Raises:
        DisallowedContent: The value or a part of it is not allowed.
    """
    if isinstance(value, dict):
        for name in value:
            if not IDENTIFIER_PATTERN.fullmatch(name) or (name.startswith("as_") and name not in ARGUMENT_KINDS):
                raise DisallowedContent(f"the unexpected key {name!r} in {MODEL}")
        if "target" in value:
            check_arguments(value["target"], value.get("inputs"))
        return {name: _sanitize_value(DROPPED_KEYS.get(name, part), name) for name, part in value.items()}
    if isinstance(value, list):
        return [_sanitize_value(part, key) for part in value]
    if not isinstance(value, str):
        return value
    if key == "expr_str":
        return canonicalize_expression(value)
    if key in ("in_spec", "out_spec"):
        return _check_tree_shape(value)
    allowed = is_operator(value) if key == "target" else FIELD_PATTERNS.get(key, IDENTIFIER_PATTERN).fullmatch(value)
    if not allowed:
        raise DisallowedContent(f"the unexpected value {value[:100]!r} of {key} in {MODEL}")
    return value


def _check_tree_shape(text: str) -> str:
    """Return the structure of a program's arguments or results; raise DisallowedContent unless it is allowed.

    Tuples of tensors are allowed, but no named arguments.
    """
    try:
        version, shape = parse_json(text)
        stack = [shape]
        while stack:
            part = stack.pop()
            if len(part) != 3 or (part["type"], part["context"]) not in ARGUMENT_STRUCTURES:
                raise ValueError
            stack += part["children_spec"]
    except (ValueError, TypeError, KeyError, LookupError):
        raise DisallowedContent(f"the unsupported argument structure {text[:100]!r} in {MODEL}") from None
    return json.dumps([int(version), shape])

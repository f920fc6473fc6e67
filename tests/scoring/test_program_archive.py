"""Archives of programs that would run code are refused before torch reads them."""

import io
import json
import os
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.export import Dim, export, save

from raytrec.common.errors import RunError
from raytrec.scoring.operators import (
    OPERATORS,
    DisallowedContent,
    check_arguments,
    compute_attention,
    compute_gru,
    is_operator,
)
from raytrec.scoring.program_archive import MODEL, SAMPLE_INPUTS_ENTRY, _loaded, load_program, sanitize_archive

WEIGHTS, CONSTANTS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("offset", torch.arange(2.0), persistent=False)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=True):
            hidden = self.layer(x)
        return (hidden.float() + self.offset + torch.zeros(x.shape[0] + 1, 1)[1:],)


class Touch:
    """An object whose pickle creates a file."""

    def __init__(self, marker):
        self._marker = str(marker)

    def __reduce__(self):
        return Path.touch, (Path(self._marker),)


@pytest.fixture(scope="module")
def program():
    exported = export(Small().eval(), (torch.ones(3, 3),), dynamic_shapes=({0: Dim("rows", min=1)},), strict=False)
    exported.example_inputs = None
    return exported


@pytest.fixture(scope="module")
def entries(program):
    into = io.BytesIO()
    save(program, into)
    with zipfile.ZipFile(into) as archive:
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "harm"


def write_archive(file, entries, more=()):
    """Write an archive; `more` are further entries, whose names may be duplicates."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (*entries.items(), *more):
            archive.writestr(f"archive/{name}", content)
    return file


def pickle_touch(marker):
    into = io.BytesIO()
    torch.save(Touch(marker), into)
    return into.getvalue()


def edit_entry(entries, name, edit):
    """Return the entries with one changed JSON document."""
    values = json.loads(entries[name])
    edit(values)
    return entries | {name: json.dumps(values).encode()}


def load_entries(folder, entries):
    return load_program(write_archive(folder / "predict.pt2", entries), 1)


def get_graph(model):
    return model["graph_module"]["graph"]


def add_pickle(name):
    """Return a function that writes an archive with an additional pickle."""
    return lambda entries, marker, file: write_archive(file, {name: pickle_touch(marker)} | entries)


def write_opaque_constant(entries, marker, file):
    about = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    changed = edit_entry(entries, CONSTANTS, lambda values: values["config"].update(harm=about))
    return write_archive(file, changed | {"data/constants/opaque_obj_0": pickle.dumps(Touch(marker))})


def write_pickled_weight(entries, marker, file):
    changed = edit_entry(entries, WEIGHTS, lambda values: values["config"]["layer.bias"].update(use_pickle=True))
    return write_archive(file, changed | {"data/weights/weight_1": pickle_touch(marker)})


def write_torch_2_7_layout(entries, marker, file):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("version", "8.8")
        archive.writestr("serialized_exported_program.json", entries[MODEL])
        for name in ("state_dict", "constants", "example_inputs"):
            archive.writestr(f"serialized_{name}.pt", pickle_touch(marker))
    return file


def write_code_expression(entries, marker, file):
    text = f"__import__('pathlib').Path({str(marker)!r}).touch() or Integer(3)"
    size = {"as_expr": {"expr_str": text, "hint": {"as_int": 3}}}
    edit = lambda model: next(iter(get_graph(model)["tensor_values"].values())).update(sizes=[size])  # noqa: E731
    return write_archive(file, edit_entry(entries, MODEL, edit))


def write_duplicate_sample_inputs(entries, marker, file):
    rest = {name: content for name, content in entries.items() if name != SAMPLE_INPUTS_ENTRY}
    with pytest.warns(UserWarning, match="Duplicate"):
        return write_archive(file, {SAMPLE_INPUTS_ENTRY: pickle_touch(marker)} | rest, [(SAMPLE_INPUTS_ENTRY, b"")])


def write_code_in_names(entries, marker, file):
    def edit(model):
        text = json.dumps(model).replace('"x"', json.dumps(f"x=__import__('pathlib').Path({str(marker)!r}).touch()"))
        model.update(json.loads(text))

    return write_archive(file, edit_entry(entries, MODEL, edit))


HARMFUL_ARCHIVES = {
    "legacy weights": add_pickle("data/weights/model.pt"),
    "legacy constants": add_pickle("data/constants/model.pt"),
    "opaque constant": write_opaque_constant,
    "pickled weight": write_pickled_weight,
    "torch 2.7 layout": write_torch_2_7_layout,
    "code expression": write_code_expression,
    "uppercase sample inputs": add_pickle("data/SAMPLE_INPUTS/model.pt"),
    "duplicate sample inputs": write_duplicate_sample_inputs,
    "code in names": write_code_in_names,
    "shared library": add_pickle("data/aotinductor/model/model.wrapper.so"),
}


@pytest.mark.slow
def test_program_without_metadata_computes_the_same(program, entries, tmp_path):
    file = write_archive(tmp_path / "predict.pt2", entries)
    rows = torch.randn(5, 3)
    (expected,), (scores,) = program.module()(rows), load_program(file, 1)(rows)
    assert torch.equal(scores, expected)
    assert str(Path(__file__).parent).encode() in entries[MODEL], "torch no longer writes local paths"
    assert str(Path(__file__).parent).encode() not in sanitize_archive(file.read_bytes())


@pytest.mark.parametrize("kind", HARMFUL_ARCHIVES)
def test_harmful_archives_are_refused(kind, entries, marker, tmp_path):
    file = HARMFUL_ARCHIVES[kind](entries, marker, tmp_path / "predict.pt2")
    with pytest.raises(RunError, match=r"the program (contains|cannot be read)"):
        load_program(file, 1)
    assert not marker.exists()
    if kind != "shared library":  # torch needs the rest of the package to load a library
        with suppress(Exception):
            torch.export.load(file).module()
        assert marker.exists(), "torch does not run this code, so the test shows nothing"


@pytest.mark.parametrize(
    "edit",
    [
        lambda model: get_graph(model)["nodes"][0].update(target="_operator.methodcaller"),
        lambda model: get_graph(model)["nodes"][0].update(target="torch.hub.load"),
        lambda model: get_graph(model)["nodes"][0].update(target="#harm:x"),
        lambda model: get_graph(model)["inputs"].append({"as_custom_obj": {"name": "a", "class_fqn": "b"}}),
        lambda model: model["graph_module"]["signature"]["input_specs"][0]["parameter"].update(
            parameter_name='a")+exec("'
        ),
        lambda model: model["graph_module"]["module_call_graph"][0]["signature"].update(
            in_spec='[1, {"type": "collections.defaultdict", "context": {"default_factory_module": "this", '
            '"default_factory_name": "s", "dict_context": []}, "children_spec": []}]'
        ),
        lambda model: model.update(torch_version="\x1b[2J"),
    ],
)
def test_unexpected_parts_of_a_program_are_refused(edit, entries, tmp_path):
    with pytest.raises(RunError, match="the program contains"):
        load_entries(tmp_path, edit_entry(entries, MODEL, edit))


@pytest.mark.parametrize(
    "text",
    [
        "Symbol(__import__('os'))",
        "Symbol('x', **{})",
        "Integer(1).__class__",
        "(lambda: 1)()",
        "Add(*[1])",
        "Add(1, [2 for _ in ()])",
        "f'{1}'",
        "Pow(Integer(9), Integer(999999999))",
        "Mul(Add(Symbol('s0'), 1), Add(Symbol('s1'), 1))",
        "Max(" * 50 + "1" + ")" * 50,
        "(" * 500,
        "\0",
    ],
)
def test_unsupported_expressions_are_refused(text, entries, tmp_path):
    size = {"as_expr": {"expr_str": text, "hint": None}}
    edit = lambda model: get_graph(model)["tensor_values"].update(y={"sizes": [size]})  # noqa: E731
    with pytest.raises(RunError, match="the program contains the unsupported expression"):
        load_entries(tmp_path, edit_entry(entries, MODEL, edit))


def test_guards_and_metadata_are_dropped(entries, tmp_path):
    edit = lambda model: model.update(guards_code=["open('harm', 'w')"])  # noqa: E731
    file = write_archive(tmp_path / "predict.pt2", edit_entry(entries, MODEL, edit))
    assert b"harm" not in sanitize_archive(file.read_bytes())
    load_program(file, 1)


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        ("torch.ops.aten.linear.default", True),
        ("torch.ops.aten.gelu.default", True),
        ("torch.ops.aten.sym_size.int", True),
        ("torch.ops.aten.add_.Tensor", True),
        ("torch.ops.aten.add.out", False),
        ("torch.ops.aten.segment_reduce.default", False),
        ("torch.ops.aten.max_pool2d_with_indices_backward.default", False),
        ("torch.ops.aten.embedding_bag.default", False),
        ("torch.ops.aten.empty.memory_format", False),
        ("torch.ops.aten.save.default", False),
        ("torch.ops.aten.from_file.default", False),
        ("torch.ops.aten._print.default", False),
        ("torch.ops.prim.device.default", False),
        ("torch.ops.load_library", False),
        ("_operator.attrgetter", False),
        ("math.sqrt", False),
    ],
)
def test_only_pure_tensor_operators_are_allowed(target, allowed):
    assert is_operator(target) is allowed


def test_allowed_operators_exist_and_check_their_bounds():
    assert not [name for name in OPERATORS.split() if not hasattr(torch.ops.aten, name)]
    x, far = torch.ones(4, 4), torch.full((2, 4), 10**9)
    for compute in (
        lambda: torch.ops.aten.embedding(x, far),
        lambda: torch.ops.aten.gather(x, 0, far),
        lambda: torch.ops.aten.index(x, [far]),
        lambda: torch.ops.aten.index_add(x, 0, far[:, 0], x[:2]),
        lambda: torch.ops.aten.index_put(x, [far[0]], x),
        lambda: torch.ops.aten.index_select(x, 0, far[0]),
        lambda: torch.ops.aten.scatter(x, 0, far, x),
        lambda: torch.ops.aten.scatter_add(x, 0, far, x),
        lambda: torch.ops.aten.narrow(x, 0, 3, 9),
        lambda: torch.ops.aten.select(x, 0, 9),
        lambda: torch.ops.aten.view(x, [99]),
    ):
        with pytest.raises((IndexError, RuntimeError)):
            compute()


BROKEN_CONTENTS = (None, b"", b"[" * 100_000, b"[1]", b"\xff{}", os.urandom(99))


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        *((name, BROKEN_CONTENTS) for name in (MODEL, WEIGHTS, CONSTANTS, "archive_format")),
        (SAMPLE_INPUTS_ENTRY, (None, b"1")),
        ("data/weights/weight_0", (None, b"", b"123")),  # manifests have checksums for other values
    ],
)
def test_damaged_archives_raise_a_clear_error(name, contents, entries, tmp_path):
    for content in contents:
        parts = {key: value for key, value in (entries | {name: content}).items() if value is not None}
        with pytest.raises(RunError, match="the program"):
            load_entries(tmp_path, parts)


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        ("sort.values", "self", {"as_name": "x"}),  # writes to its arguments
        ("xlogy.OutTensor", "self", {"as_name": "x"}),
        ("pad.default", "mode", {"as_string": "circular"}),  # uninitialized memory
        ("div.Tensor_mode", "rounding_mode", {"as_string": "trunc"}),  # −2⁶³ ÷ −1
        ("zeros.default", "dtype", {"as_int": -1}),
        ("view.dtype", "dtype", {"as_sym_int": {"as_name": "s"}}),
        ("ones.default", "layout", {"as_layout": 2}),  # CSR with uninitialized indices
        ("ones.default", "layout", {"as_int": 7}),
        ("clone.default", "memory_format", {"as_int": 99}),
        ("add.Tensor", "unknown", {"as_int": 1}),
    ],
)
def test_arguments_that_torch_does_not_check_are_refused(target, name, value):
    with pytest.raises(DisallowedContent):
        check_arguments(f"torch.ops.aten.{target}", [{"name": name, "arg": value, "kind": 1}])


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        ("pad.default", "mode", {"as_string": "constant"}),
        ("zeros.default", "dtype", {"as_scalar_type": 7}),
        ("zeros.default", "dtype", {"as_none": True}),
        ("ones.default", "layout", {"as_layout": 7}),
        ("sum.dim_IntList", "dim", {"as_ints": [1]}),
        ("add_.Tensor", "other", {"as_float": 1.0}),
    ],
)
def test_checked_arguments_are_accepted(target, name, value):
    check_arguments(f"torch.ops.aten.{target}", [{"name": name, "arg": value, "kind": 1}])


def test_archive_with_a_number_as_dtype_is_refused(entries, tmp_path):
    def edit(model):
        node = next(node for node in get_graph(model)["nodes"] if node["target"] == "torch.ops.aten.zeros.default")
        node["inputs"].append({"name": "dtype", "arg": {"as_int": -1}, "kind": 2})

    with pytest.raises(RunError, match="an invalid value of the argument 'dtype'"):
        load_entries(tmp_path, edit_entry(entries, MODEL, edit))


class Attention(torch.nn.Module):
    """Sequence model with the operators whose sizes torch does not check."""

    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        states = self.gru(x)[0]
        return (torch.nn.functional.scaled_dot_product_attention(states, x, states),)


@pytest.mark.slow
def test_loaded_programs_check_sizes_at_each_call(tmp_path):
    torch.manual_seed(0)
    module, x = Attention().eval(), torch.randn(3, 5, 4)
    with torch.no_grad():
        exported = export(module, (x,), dynamic_shapes=({0: Dim("rows", min=1)},), strict=False)
        expected = module(x)[0]
    exported.example_inputs = None
    save(exported, into := io.BytesIO())
    (tmp_path / "predict.pt2").write_bytes(into.getvalue())
    program = load_program(tmp_path / "predict.pt2", 1)
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert {compute_attention, compute_gru} <= targets
    with torch.inference_mode():
        assert torch.allclose(program(x)[0], expected, atol=1e-6)


def test_attention_and_gru_refuse_sizes_that_do_not_fit():
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    assert torch.equal(compute_attention(q, k, k), torch.nn.functional.scaled_dot_product_attention(q, k, k))
    for key, value in (
        (k, k[:, :, :6]),
        (k[:, :, :1], k),
        (k[:, :2], k[:, :2]),
        (k[..., :3], k),
        (k[:, :, :0], k[:, :, :0]),
    ):
        with pytest.raises(RuntimeError, match="do not match"):
            compute_attention(q, key, value)
    gru, x, start = torch.nn.GRU(4, 6), torch.randn(5, 2, 4), torch.zeros(1, 2, 6)
    options = (True, 1, 0.0, False, False, False)
    assert torch.equal(compute_gru(x, start, gru._flat_weights, *options)[0], gru(x)[0])
    for place in range(4):
        weights = [w[:1] if i == place else w for i, w in enumerate(gru._flat_weights)]
        with pytest.raises(RuntimeError, match="expected a GRU"):
            compute_gru(x, start, weights, *options)


def with_weights(entries, change):
    """Return entries whose first weights are those of `change`, and another serialization id."""
    name = next(name for name in entries if name.startswith("data/weights/weight_"))
    return entries | {name: change(entries[name]), ".data/serialization_id": b"another"}


def test_program_with_other_weights_shares_only_the_code(entries, tmp_path):
    rows, changed = torch.randn(7, 3), with_weights(entries, lambda values: values[4:] + values[:4])
    first = load_entries(tmp_path, entries)
    expected = first(rows)[0]
    second = load_entries(tmp_path, changed)
    assert type(second) is type(first)
    scores = second.forward(rows)[0]
    assert not torch.equal(scores, expected) and torch.equal(first.forward(rows)[0], expected)
    pointers = [{tensor.data_ptr() for tensor in each.state_dict().values()} for each in (first, second)]
    assert not pointers[0] & pointers[1]
    _loaded.clear()
    alone = load_entries(tmp_path, changed)
    assert type(alone) is not type(second) and torch.equal(alone.forward(rows)[0], scores)


def test_program_with_other_constants_shares_no_code(entries, tmp_path):
    name = next(name for name in entries if name.startswith("data/constants/tensor_"))
    first, rows = load_entries(tmp_path, entries), torch.randn(7, 3)
    second = load_entries(tmp_path, entries | {name: entries[name][::-1]})
    assert type(second) is not type(first) and not torch.equal(second(rows)[0], first(rows)[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: with_weights(entries, lambda values: values[:-4]),
        lambda entries: with_weights(entries, lambda values: b""),
        lambda entries: entries | {"data/weights/weight_9": b"more"},
        lambda entries: entries | {"extra/more.py": b"more"},
        lambda entries: {name: value for name, value in entries.items() if not name.endswith("weight_0")},
    ],
)
def test_archive_is_checked_even_if_its_program_is_in_memory(entries, tmp_path, change):
    program = load_entries(tmp_path, entries)
    with pytest.raises(RunError, match="the program"):
        load_entries(tmp_path, change(entries))
    del program

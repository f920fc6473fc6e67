"""Operators and symbolic expressions that programs of exports may contain, and checks of operator arguments."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from torch import Tensor, fx

from raytrec.common.formatting import as_dict
from raytrec.compat.torch_ import get_schema, is_dispatched

aten = torch.ops.aten
MODEL = "models/model.json"  # entry of an archive that contains the graph
OPERATOR_PATTERN = re.compile(r"torch\.ops\.aten\.(\w+?)_?\.(?!\w*out)\w+")
# Allowed operators of aten. On CPU, they check every index and size, and return no uninitialized memory. Operators
# that are not listed, such as segment_reduce, may access memory outside of their tensors.
OPERATORS = """
_assert_scalar _assert_tensor_metadata _log_softmax _softmax _to_copy abs acos add addcdiv addcmul addmm
alias all amax amin any arange argmax argmin argsort asin atan atan2 baddbmm batch_norm bitwise_and
bitwise_not bitwise_or bitwise_xor bmm broadcast_to cat ceil celu chunk clamp clamp_max clamp_min clone
concat contiguous conv1d copy cos cosh cosine_similarity count_nonzero cummax cumprod cumsum detach div dot
dropout einsum elu embedding eq erf exp exp2 expand expand_as expm1 fill flatten flip floor floor_divide
fmod full full_like gather ge gelu glu group_norm gt hardsigmoid hardswish hardtanh index index_add
index_put index_select isfinite isinf isnan layer_norm le leaky_relu lerp lift_fresh_copy linalg_vector_norm
linear log log10 log1p log2 log_sigmoid log_softmax logaddexp logical_and logical_not logical_or logical_xor
logit logsumexp lt masked_fill matmul max maximum mean min minimum mish mm movedim mul mv nan_to_num narrow
ne neg new_full new_ones new_zeros norm ones ones_like outer pad permute pow prelu prod reciprocal relu
relu6 remainder repeat reshape rms_norm roll round rsqrt rsub scalar_tensor scaled_dot_product_attention
scatter scatter_add select selu sigmoid sign silu sin sinh slice softmax softplus sort split
split_with_sizes sqrt square squeeze stack std sub sum sym_size t tan tanh threshold tile to topk transpose
tril triu true_divide trunc type_as unbind unflatten unsqueeze var var_mean view view_as where xlogy zeros
zeros_like
"""
OPERATOR_NAMES = frozenset(OPERATORS.split())
SIZES = "add sub mul floordiv truediv mod neg eq ne lt le gt ge and_ or_ getitem"  # on tensor sizes
OTHER_OPERATORS = {
    *("torch.ops.higher_order.wrap_with_autocast", "torch.ops.higher_order.wrap_with_set_grad_enabled"),
    *("torch.ops.aten.gru.input", "torch.ops.aten.repeat_interleave.self_int"),
    *("torch.sym_float", "torch.sym_int", "torch.sym_max", "torch.sym_min", "torch.sym_not", "math.trunc"),
    *(f"_operator.{name}" for name in SIZES.split()),
}
# Type of an argument in an operator's schema → its kind in an archive. torch would not check a plain number.
ENUM_KINDS = {"ScalarType": "as_scalar_type", "Layout": "as_layout", "MemoryFormat": "as_memory_format"}
EXPRESSION_FUNCTIONS = {
    *("Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Mod", "PythonMod", "FloorDiv", "CeilToInt"),
    *("IntTrueDiv", "ToFloat", "TruncToInt", "Max", "Min", "And", "Or", "Not", "Equality", "Unequality"),
    *("GreaterThan", "StrictGreaterThan", "LessThan", "StrictLessThan"),
}
EXPRESSION_ATOMS = ("Symbol", "Integer", "Float", "Rational")
MAX_EXPRESSION_CHARACTERS, MAX_EXPRESSION_CALLS = 2000, 40  # maximum length of an expression and number of its calls
IDENTIFIER_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|")  # torch writes names into source code
STRIDED = 7  # code of torch.strided in archives
# Circular padding returns uninitialized memory. −2⁶³ ÷ −1 with rounding mode trunc crashes the process.
REFUSED_OPTIONS = {"circular", "trunc"}


class DisallowedContent(ValueError):
    """Error for an archive with content that `raytrec export` does not write; the message is a noun phrase."""


def is_operator(target: str) -> bool:
    """Return True if a program may call the operator with this name, such as torch.ops.aten.add.Tensor."""
    name = (OPERATOR_PATTERN.fullmatch(target) or ("", ""))[1]
    return target in OTHER_OPERATORS or (name in OPERATOR_NAMES and is_dispatched(target))


def check_arguments(target: Any, inputs: Any) -> None:
    """Check the arguments with which a node of a program calls an operator.

    Args:
        target: Name of the operator, as in `is_operator`; only allowed operators of aten are checked.
        inputs: Arguments as stored in an archive.

    Raises:
        DisallowedContent: The operator writes to a keyword-only argument such as `out`, an argument is unknown, or
            an argument has a kind or value that is not allowed.
    """
    if not isinstance(target, str) or not target.startswith("torch.ops.aten.") or not is_operator(target):
        return
    arguments = {argument.name: argument for argument in get_schema(target).arguments}
    if any(each.kwarg_only and each.alias_info is not None and each.alias_info.is_write for each in arguments.values()):
        raise DisallowedContent(f"the operator {target}, which writes to an output argument")
    for entry in map(as_dict, inputs if isinstance(inputs, list) else ()):
        name, value = entry.get("name"), as_dict(entry.get("arg"))
        if name not in arguments:
            raise DisallowedContent(f"the unknown argument {str(name)[:100]!r} of {target}")
        kinds = {kind for kind_name, kind in ENUM_KINDS.items() if kind_name in str(arguments[name].real_type)}
        is_invalid_enum = kinds and not value.keys() <= {*kinds, "as_none"}
        if is_invalid_enum or value.get("as_layout", STRIDED) != STRIDED or value.get("as_string") in REFUSED_OPTIONS:
            raise DisallowedContent(f"an invalid value of the argument {name!r} of {target}")


def add_size_checks(program: torch.nn.Module) -> None:
    """Make a program, in place, check sizes before it calls an operator that could read outside of its tensors."""
    for module in program.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.target = SIZE_CHECKED.get(node.target, node.target) if node.op == "call_function" else node.target
            module.recompile()


def compute_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """Call `scaled_dot_product_attention`; raise RuntimeError for sizes that torch does not check."""
    fits = query.shape[:-2] == key.shape[:-2] and key.shape[:-1] == value.shape[:-1]
    if not fits or query.shape[-1] != key.shape[-1] or min(*query.shape, *key.shape, *value.shape) == 0:
        shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
        raise RuntimeError(f"the shapes of query, key and value do not match or contain 0: {shapes}")
    return aten.scaled_dot_product_attention.default(query, key, value, *args, **options)


def compute_gru(
    steps_BTD: Tensor,
    initial_1BH: Tensor,
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """Call `gru` for one layer; raise RuntimeError for sizes that torch does not check."""
    inputs, width = steps_BTD.shape[-1], initial_1BH.shape[-1]
    shapes = [(3 * width, inputs), (3 * width, width), *[(3 * width,)] * 2 * has_biases]
    actual_shapes = [tuple(weight.shape) for weight in weights]
    if (layers, bidirectional, steps_BTD.dim()) != (1, False, 3) or actual_shapes != shapes:
        expected = f"a GRU of one layer and direction with 3-D input and weights {shapes}"
        actual = f"{layers} layers, bidirectional={bidirectional}, {steps_BTD.dim()}-D input, weights {actual_shapes}"
        raise RuntimeError(f"expected {expected}, got {actual}")
    return aten.gru.input(
        steps_BTD, initial_1BH, weights, has_biases, layers, dropout, train, bidirectional, batch_first
    )


def canonicalize_expression(text: str) -> str:
    """Return a symbolic expression, such as "Add(Symbol('s0', integer=True), Integer(1))", in canonical form.

    Expressions must be checked, because sympy evaluates them as Python code.

    Raises:
        DisallowedContent: The expression is too long, is not valid Python, or is rejected by `_is_expression`.
    """
    try:
        short = len(text) <= MAX_EXPRESSION_CHARACTERS and text.count("(") <= MAX_EXPRESSION_CALLS
        tree = ast.parse(text, mode="eval") if short else None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        tree = None
    if tree is None or not _is_expression(tree.body):
        raise DisallowedContent(f"the unsupported expression {text[:100]!r} in {MODEL}")
    return ast.unparse(tree)


def _is_expression(node: ast.expr) -> bool:
    """Return True for a number, a truth value, or a call of EXPRESSION_FUNCTIONS whose arguments are expressions.

    Symbol takes a name and flags instead. At most one factor of a product may be a call other than of
    EXPRESSION_ATOMS, because sympy expands products of sums in exponential time.
    """
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    if isinstance(node, ast.Name):
        return node.id in ("true", "false")
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EXPRESSION_FUNCTIONS):
        return False
    if node.func.id != "Symbol":
        calls = [
            arg for arg in node.args if isinstance(arg, ast.Call) and ast.unparse(arg.func) not in EXPRESSION_ATOMS
        ]
        if node.func.id == "Mul" and len(calls) > 1:
            return False
        return not node.keywords and all(_is_expression(argument) for argument in node.args)
    name, *more = [getattr(argument, "value", None) for argument in node.args]
    flags = [(keyword.arg, getattr(keyword.value, "value", None)) for keyword in node.keywords]
    is_name = isinstance(name, str) and IDENTIFIER_PATTERN.fullmatch(name)
    return bool(is_name) and not more and all(word and isinstance(flag, bool) for word, flag in flags)


SIZE_CHECKED = {aten.scaled_dot_product_attention.default: compute_attention, aten.gru.input: compute_gru}

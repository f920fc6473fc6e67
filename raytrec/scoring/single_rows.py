"""Rewrite programs so that the part that depends only on the user is computed once per user.

A program of torch.export is a list of operators over tensors of B rows, here one row per candidate. If some inputs
have one row per user, [U, …], an operator that reads only such inputs also returns one row per user. For any other
operator, the rows of the users are repeated for their candidates. Pointwise operators and matrix products broadcast
the row of a single user instead. The input of dense columns has one row per candidate if it contains columns of both
users and candidates. Operators that select only columns of users then read an additional tensor, [U, …].

A linear layer over columns of both parts is divided: W · cat(user, candidate) = W₁ · user + W₂ · candidate. The dot
products of all pairs of vectors (as in DLRM) are also divided, so that products of two user vectors are computed once.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any, Literal

import torch
from torch import fx

from raytrec.scoring.manifest import Input

aten = torch.ops.aten
BROADCASTING_OPERATORS = {aten.einsum.default, aten.matmul.default}
# Outputs of rewritten and original programs are compared on random inputs: tolerance, and user of each row.
COMPARISON_TOLERANCE, COMPARED_USERS = 1e-5, ([0] * 5, [0, 1, 1, 2, 2])
Program = Callable[..., tuple[torch.Tensor, ...]]
ValueOrigin = Literal["user", "rows", "none", "size"]


class RewrittenProgram:
    """Program in which some inputs have one row per user, as returned by `rewrite_for_single_rows`.

    Args:
        module: Rewritten graph, which shares weights with the original program.
        copy_weights: Functions that copy columns of original weights to weights of the rewritten graph.
    """

    def __init__(self, module: fx.GraphModule, copy_weights: Sequence[Callable[[], object]]):
        self._forward, self._copy_weights = module.forward, copy_weights

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the program."""
        return self._forward(*tensors)

    def refresh(self) -> None:
        """Copy columns of the original program's weights again, after their values have changed."""
        for copy in self._copy_weights:
            copy()


def rewrite_for_single_rows(
    program: fx.GraphModule, inputs: Sequence[Input], once: Collection[int], user_columns: Collection[int] = ()
) -> RewrittenProgram | None:
    """Return a program in which some inputs have one row per user; None if rewriting fails or changes the outputs.

    Both programs are run on random inputs; torch's random state is restored. Outputs count as changed beyond
    COMPARISON_TOLERANCE.

    Args:
        program: Graph of ExportedProgram.module().
        inputs: Inputs of the program. The rewritten program takes two more: the user of each row, int64 [B], and the
            dense columns of users, float32 [U, n], or None if `user_columns` is empty.
        once: Indices of the inputs with one row per user.
        user_columns: Indices of the user's dense columns; empty if the input of dense columns is in `once`.
    """
    torch_state = torch.random.get_rng_state()
    try:
        dense = next((place for place, each in enumerate(inputs) if user_columns and each.kind == "dense"), None)
        rewritten = _ProgramRewriter(program, once, dense, user_columns).result()
        for users_B in map(torch.tensor, COMPARED_USERS):
            sizes = len(users_B), int(users_B.max()) + 1
            examples = [make_example_input(each, sizes[i in once]) for i, each in enumerate(inputs)]
            columns_Un = None
            if dense is not None:
                columns_Un, columns = make_example_input(inputs[dense], sizes[1]), list(user_columns)
                examples[dense][:, columns] = columns_Un[users_B][:, columns]
            repeated = [repeat_rows(t, users_B).contiguous() if i in once else t for i, t in enumerate(examples)]
            with torch.inference_mode():
                pairs = zip(rewritten(*examples, users_B, columns_Un), program.forward(*repeated), strict=True)
                if not all(a.shape == b.shape and _is_close(a, b) for a, b in pairs):
                    return None
    except (_UnsupportedProgram, RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None
    finally:
        torch.random.set_rng_state(torch_state)
    return rewritten


def _is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.allclose(actual, expected, rtol=COMPARISON_TOLERANCE, atol=COMPARISON_TOLERANCE, equal_nan=True))


def repeat_rows(values: torch.Tensor, users_B: torch.Tensor, dim: int = 0, broadcast: bool = False) -> torch.Tensor:
    """Return the values of each row's user: size U of `dim` becomes B.

    Args:
        values: Values of U users, in dimension `dim`.
        users_B: Index of each row's user, int64 [B].
        dim: Dimension of the users.
        broadcast: True to leave a size of 1 unchanged, because the result is broadcast.
    """
    if values.shape[dim] > 1:
        return values.index_select(dim, users_B)
    return values if broadcast else values.expand(*values.shape[:dim], len(users_B), *values.shape[dim + 1 :])


def _multiply(ones_RND: torch.Tensor, others_UMD: torch.Tensor, users_B: torch.Tensor | None = None) -> torch.Tensor:
    """Return the dot products of N and M vectors in each of R rows, [R, N · M].

    Args:
        ones_RND: N vectors per row (or per user).
        others_UMD: M vectors per row, or per user if `users_B` is given.
        users_B: User of each row, ascending; None: the arguments have the same number of rows.
    """
    if users_B is None:
        return (ones_RND @ others_UMD.mT).flatten(1)
    parts = ones_RND.split(torch.bincount(users_B, minlength=len(others_UMD)).tolist())
    return torch.cat([part @ other.mT for part, other in zip(parts, others_UMD, strict=True)]).flatten(1)


def _copy_columns(part_OI: torch.Tensor, places: torch.Tensor, weight_OI: torch.Tensor, columns: torch.Tensor) -> None:
    """Copy columns of a weight to the columns `places` of another weight; columns with the same place are added."""
    part_OI.zero_().index_add_(1, places, weight_OI[:, columns])


def make_example_input(of: Input, rows: int) -> torch.Tensor:
    """Return a tensor with the shape and dtype of an input; its values are random, except for kind present."""
    if of.kind == "present":
        return torch.arange(of.length) < torch.arange(rows).unsqueeze(1) + 1
    if of.kind in ("dense", "bag"):
        return torch.randn(rows, of.width)
    dtype = torch.float64 if of.kind == "side_features" else torch.float32
    return torch.randn(rows, of.length, of.width, dtype=dtype)


class _UnsupportedProgram(Exception):
    """Error for a program that contains an operation or size that cannot be rewritten."""


@dataclass(eq=False)
class _Value:
    """Tensor of the program, or a size that is a multiple of the number of rows.

    Attributes:
        origin: user (tensor with U rows), rows (tensor with B rows), size, or none (such as a weight).
        shape: Shape in the original program, with a symbolic number of rows; () for a size.
        new: Node in the rewritten program. For a size, the node of its value for U rows.
        rows: For a size, the node of its value for B rows.
    """

    origin: ValueOrigin
    shape: Sequence[Any]
    new: fx.Node
    rows: fx.Node | None = None


class _ProgramRewriter:
    """Rewriter of one program, node by node.

    Args:
        program: Graph of the program.
        once: Indices of the inputs with one row per user.
        dense: Index of the input of dense columns if it contains columns of both users and rows, else None.
        columns: Indices of the users' columns in this input.
    """

    def __init__(self, program: fx.GraphModule, once: Collection[int], dense: int | None, columns: Collection[int]):
        self._program, self._graph = program, fx.Graph()
        self._weights: dict[str, torch.Tensor] = {}
        self._copy_weights: list[Callable[[], object]] = []
        self._values: dict[fx.Node, _Value] = {}
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        new = [self._graph.placeholder(f"input_{place}") for place in range(len(placeholders))]
        for place, node in enumerate(placeholders):
            origin: ValueOrigin = "user" if place in once else "rows"
            self._values[node] = _Value(origin, node.meta["val"].shape, new[place])
        self._symbol = placeholders[0].meta["val"].shape[0].node.expr
        self._users_B = self._graph.placeholder("users")
        self._columns_Un, self._user_columns = self._graph.placeholder("columns", default_value=None), {*columns}
        self._dense = None if dense is None else placeholders[dense]
        self._sizes = [self._call(aten.sym_size.int, each, 0) for each in (new[min(once)], self._users_B)]

    def result(self) -> RewrittenProgram:
        """Return the rewritten program."""
        for node in self._program.graph.nodes:
            if node.op == "get_attr":
                weight = self._weights[node.target] = operator.attrgetter(node.target)(self._program)
                shape = getattr(weight, "shape", ())  # a graph of several operators has no shape
                self._values[node] = _Value("none", shape, self._graph.get_attr(node.target))
            elif node.op == "call_function":
                self._values[node] = self._rewrite_node(node)
            elif node.op == "output":
                self._graph.output(fx.map_arg(node.args[0], lambda a: self._repeat(self._values[a])))
            elif node.op != "placeholder":
                raise _UnsupportedProgram(node.op)
        self._graph.eliminate_dead_code()
        return RewrittenProgram(fx.GraphModule(self._weights, self._graph), self._copy_weights)

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self._graph.call_function(target, args)

    def _rewrite_node(self, node: fx.Node) -> _Value:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            factor = value.node.expr / self._symbol
            if not factor.is_Integer:
                raise _UnsupportedProgram("a size that is not a multiple of the number of rows")
            return _Value("size", (), *(self._call(operator.mul, size, int(factor)) for size in self._sizes))
        shape = getattr(value, "shape", ())
        if self._selects_user_columns(node):
            select = self._copy(node, lambda value: self._columns_Un if value.origin == "rows" else value.new)
            return _Value("user", shape, select)
        kinds = {self._values[each].origin for each in node.all_input_nodes}
        if "rows" not in kinds:
            origin: ValueOrigin = "user" if kinds & {"user", "size"} else "none"
            return _Value(origin, shape, self._copy(node, lambda value: value.new))
        if node.target is aten.linear.default and (divided := self._divide_linear(node)):
            return _Value("rows", shape, divided)
        if node.target is aten.bmm.default and "user" in kinds:
            return _Value("rows", shape, self._copy(node, self._broadcast, aten.matmul.default))
        broadcasts = node.target in BROADCASTING_OPERATORS or torch.Tag.pointwise in getattr(node.target, "tags", ())
        return _Value("rows", shape, self._copy(node, self._broadcast if broadcasts else self._repeat))

    def _selects_user_columns(self, node: fx.Node) -> bool:
        """Return True if a node selects dense columns that are all columns of the user."""
        if self._dense is None or node.target not in (aten.select.int, aten.index_select.default):
            return False
        source, dim, places = node.args
        if source.target is aten.slice.Tensor and source.args[1:] == (0, 0, sys.maxsize):
            source = source.args[0]
        if source is not self._dense or dim != 1:
            return False
        columns = self._weights[places.target].tolist() if isinstance(places, fx.Node) else [places]
        return self._user_columns.issuperset(columns)

    def _copy(self, node: fx.Node, argument: Callable[[_Value], fx.Node], target: Any = None) -> fx.Node:
        args, kwargs = (fx.map_arg(a, lambda n: argument(self._values[n])) for a in (node.args, node.kwargs))
        return self._graph.create_node("call_function", target or node.target, args, kwargs)

    def _broadcast(self, value: _Value) -> fx.Node:
        """Return the node of a tensor that broadcasts with B rows, or of a size for B rows."""
        return self._repeat(value, broadcast=True)

    def _repeat(self, value: _Value, broadcast: bool = False) -> fx.Node:
        """Return the node of a value for B rows: rows of users are repeated; a value without rows is unchanged."""
        if value.rows:
            return value.rows
        dims = [dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
        if value.origin != "user" or not dims:
            return value.new
        if [value.shape[dim].node.expr for dim in dims] != [self._symbol]:
            raise _UnsupportedProgram("a tensor with a different number of rows")
        return self._call(repeat_rows, value.new, self._users_B, dims[0], broadcast)

    def _divide_linear(self, node: fx.Node) -> fx.Node | None:
        """Return a linear layer's output as the sum over users' and rows' columns; None unless it reads both."""
        source, weight, *bias = node.args
        columns = self._list_columns(source)
        if {value.origin for value, _ in columns} != {"user", "rows"} or weight.op != "get_attr":
            return None
        weight_OI, outputs = self._weights[weight.target].detach(), []
        for origin, biases in ("user", ()), ("rows", [self._values[each].new for each in bias if each]):
            widths = {value: value.shape[-1] for value, _ in columns if value.origin == origin}
            starts = dict(zip(widths, accumulate(widths.values(), initial=0), strict=False))
            moves = [(at, starts[value] + place) for at, (value, place) in enumerate(columns) if value in starts]
            before, after = torch.tensor(moves).T
            name = f"{node.name}_{origin}"
            part_OI = self._weights[name] = weight_OI.new_empty(len(weight_OI), sum(widths.values()))
            self._copy_weights.append(partial(_copy_columns, part_OI, after, weight_OI, before))
            self._copy_weights[-1]()
            joined = self._call(aten.cat.default, [value.new for value in widths], -1)
            outputs.append(self._call(aten.linear.default, joined, self._graph.get_attr(name), *biases))
        user = _Value("user", node.meta["val"].shape, outputs[0])
        return self._call(operator.add, outputs[1], self._broadcast(user))

    def _list_columns(self, node: fx.Node) -> list[tuple[_Value, int]]:
        """Return the source of each column (last dimension) of a tensor as (tensor, column in that tensor)."""
        value, last = self._values[node], len(node.meta["val"].shape) - 1
        if node.target is aten.cat.default and node.args[1:] in ((-1,), (last,)):
            return [column for part in node.args[0] for column in self._list_columns(part)]
        if node.target is aten.index_select.default and node.args[1] == last and node.args[2].op == "get_attr":
            columns = self._list_columns(node.args[0])
            return [columns[place] for place in self._weights[node.args[2].target].tolist()]
        vectors = [self._values[each] for each in _match_pair_products(node)]
        if {each.origin for each in vectors} == {"user", "rows"}:
            return self._list_pair_products(vectors)
        return [(value, place) for place in range(value.shape[last])]

    def _list_pair_products(self, vectors: Sequence[_Value]) -> list[tuple[_Value, int]]:
        """Return the source of each dot product of a pair of vectors, as `_list_columns` does."""
        users, rows = ([i for i, each in enumerate(vectors) if each.origin == origin] for origin in ("user", "rows"))
        users_UMD, rows_BND = (
            self._call(aten.stack.default, [vectors[i].new for i in each], 1) for each in (users, rows)
        )
        columns = {}
        for ones, others, new in (
            (users, users, self._call(_multiply, users_UMD, users_UMD)),
            (rows, users, self._call(_multiply, rows_BND, users_UMD, self._users_B)),
            (rows, rows, self._call(_multiply, rows_BND, rows_BND)),
        ):
            value = _Value("user" if ones is users else "rows", [len(ones) * len(others)], new)
            for place, (i, j) in enumerate(product(ones, others)):
                columns[i, j] = columns[j, i] = value, place
        return [columns[i, j] for i, j in product(range(len(vectors)), repeat=2)]


def _match_pair_products(node: fx.Node) -> Sequence[fx.Node]:
    """Return the vectors if a node contains the dot products of all pairs of vectors; () for other nodes."""
    if node.target is aten.flatten.using_ints and node.args[1:] == (1,) and node.args[0].target is aten.bmm.default:
        stack, transposed = node.args[0].args
        if (transposed.target, transposed.args) == (aten.transpose.int, (stack, 1, 2)):
            return stack.args[0] if stack.target is aten.stack.default and stack.args[1:] == (1,) else ()
    return ()

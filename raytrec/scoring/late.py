"""Programs rewritten for one user and many candidates: what follows from the user alone is computed once.

A program of torch.export is a list of operators over tensors of B rows. Where some inputs have one row, that
of the user, an operator of such inputs alone gives one row, too, and pointwise ones broadcast it. Two places
mix user and candidates early, in the models of raytrec and in most others, and are divided:

    linear(cat(user, candidate))    = linear(user) + linear(candidate), each with its columns of the weight
    products of all pairs of a stack: those of two of the user's vectors are the user's

Elsewhere the user's row is repeated just before it is needed. Sums are rounded in another order, so scores
are equal to those of full rows within float32's rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from raytrec.scoring.inputs import Input

aten = torch.ops.aten
BROADCASTING = {aten.einsum.default, aten.matmul.default}
CLOSE, TRIED_ROWS = 1e-5, 5  # by which a rewritten program is compared with the whole one, on random inputs
Program = Callable[..., tuple[torch.Tensor, ...]]
Origin = Literal["user", "rows", "none"]
Step = Literal["stack", "transposed", "products", "flat"]


def compute_once(program: fx.GraphModule, inputs: Sequence[Input], once: Collection[int]) -> Program | None:
    """The program for inputs of which some have one row, that of all rows; None: it cannot be rewritten.

    Args:
        program: of ExportedProgram.module(); it takes `inputs`.
        once: places of the inputs with one row.
    """
    torch_state = torch.random.get_rng_state()
    try:
        rewritten = _Rewriting(program, once).result()
        given = [example(each, 1 if i in once else TRIED_ROWS) for i, each in enumerate(inputs)]
        whole = [t.expand(TRIED_ROWS, *t.shape[1:]).contiguous() for t in given]
        with torch.inference_mode():
            pairs = zip(rewritten(*given), program.forward(*whole), strict=True)
            same = all(got.shape == wanted.shape and _close(got, wanted) for got, wanted in pairs)
    except (_Cannot, RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None
    finally:
        torch.random.set_rng_state(torch_state)
    return rewritten if same else None


def _close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(torch.allclose(got, wanted, rtol=CLOSE, atol=CLOSE, equal_nan=True))


def example(of: Input, rows: int) -> torch.Tensor:
    """A tensor as an input is."""
    if of.kind == "present":
        return torch.arange(of.length) < torch.arange(rows).unsqueeze(1) + 1
    if of.kind in ("dense", "bag"):
        return torch.randn(rows, of.width)
    dtype = torch.float64 if of.kind == "side_features" else torch.float32
    return torch.randn(rows, of.length, of.width, dtype=dtype)


class _Cannot(Exception):
    """The program does something that the rewriting does not know."""


@dataclass
class _Value:
    """What a node of the program becomes.

    Attributes:
        of: of the user (one row), of each row, or of neither. old: the program's node. new: that of the
            rewritten one; None: it is made when it is asked for.
    """

    of: Origin
    old: fx.Node
    new: fx.Node | None = None


@dataclass
class _Columns(_Value):
    """[B, width], of which some columns are the user's.

    Attributes:
        user: [1, …]. rows: [B, …]. places: which columns of the whole are the user's; those of the rows.
    """

    user: fx.Node | None = None
    rows: fx.Node | None = None
    places: tuple[list[int], list[int]] = ([], [])


@dataclass
class _Stack(_Value):
    """[B, n, D], of which some vectors are the user's; or what becomes of it on the way to its products.

    Attributes:
        parts: the n vectors. step: stack, its transpose, the products of all pairs [B, n, n], and these flat.
    """

    parts: list[_Value] = field(default_factory=list)
    step: Step = "stack"


@dataclass
class _Size:
    """A number of rows: that of a tensor of the user's, and the node that gives that of each row's."""

    user: int
    rows: fx.Node | None


class _Rewriting:
    """One program, rewritten node by node."""

    def __init__(self, program: fx.GraphModule, once: Collection[int]):
        self._program, self._graph = program, fx.Graph()
        self._values: dict[fx.Node, _Value | _Size] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        for place, node in enumerate(placeholders):
            of: Origin = "user" if place in once else "rows"
            self._values[node] = _Value(of, node, self._graph.placeholder(f"input_{place}"))
        first = next(node for place, node in enumerate(placeholders) if place not in once)
        self._symbol = first.meta["val"].shape[0].node.expr
        self._rows = self._call(aten.sym_size.int, self._value(first).new, 0)

    def result(self) -> Program:
        """The rewritten program."""
        for node in self._program.graph.nodes:
            if node.op == "get_attr":
                self._values[node] = _Value("none", node, self._graph.get_attr(node.target))
            elif node.op == "call_function":
                self._values[node] = self._rewritten(node)
            elif node.op == "output":
                self._graph.output(fx.map_arg(node.args[0], lambda a: self._of_rows(self._value(a))))
            elif node.op != "placeholder":
                raise _Cannot(node.op)
        self._graph.eliminate_dead_code()
        attributes = {node.target for node in self._program.graph.nodes if node.op == "get_attr"}
        root = {name: operator.attrgetter(name)(self._program) for name in attributes} | self._tensors
        return fx.GraphModule(root, self._graph).forward

    def _value(self, node: fx.Node) -> _Value:
        value = self._values[node]
        if isinstance(value, _Size):
            raise _Cannot("a size in the place of a tensor")
        return value

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self._graph.call_function(target, args)

    def _tensor(self, value: torch.Tensor) -> fx.Node:
        """A constant that the program had not."""
        name = f"divided_{len(self._tensors)}"
        self._tensors[name] = value
        return self._graph.create_node("get_attr", name)

    def _constant(self, value: _Value) -> torch.Tensor:
        if value.of != "none" or value.old.op != "get_attr":
            raise _Cannot("not a weight")
        return operator.attrgetter(value.old.target)(self._program).detach()

    def _rewritten(self, node: fx.Node) -> _Value | _Size:
        given = [self._values[each] for each in node.all_input_nodes]
        if isinstance(node.meta.get("val"), torch.SymInt):
            return self._size(node, given)
        kinds = {value.of for value in given if isinstance(value, _Value)}
        if "rows" not in kinds:
            of: Origin = "user" if "user" in kinds or any(isinstance(v, _Size) for v in given) else "none"
            return _Value(of, node, self._copied(node, lambda v: v.user if isinstance(v, _Size) else v.new))
        divided = self._divided(node)
        return divided or _Value("rows", node, self._mixed(node, "user" in kinds))

    def _size(self, node: fx.Node, given: list[_Value | _Size]) -> _Size:
        expression = node.meta["val"].node.expr
        user = int(expression.subs({self._symbol: 1}))
        if expression == self._symbol:
            return _Size(user, self._rows)
        if any(isinstance(v, _Value) and v.of == "user" for v in given):
            return _Size(user, None)
        return _Size(user, self._copied(node, self._as_it_is))

    def _copied(self, node: fx.Node, argument: Callable[[Any], Any], target: Any = None) -> fx.Node:
        args, kwargs = (fx.map_arg(a, lambda n: argument(self._values[n])) for a in (node.args, node.kwargs))
        return self._graph.create_node("call_function", target or node.target, args, kwargs)

    def _as_it_is(self, value: _Value | _Size) -> fx.Node:
        """One row of what is the user's."""
        if isinstance(value, _Size):
            if value.rows is None:
                raise _Cannot("a size of the user's tensor")
            return value.rows
        return value.new if value.of != "rows" else self._of_rows(value)

    def _mixed(self, node: fx.Node, has_user: bool) -> fx.Node:
        """An operator of which at least one tensor is of each row."""
        target = node.target
        if not has_user:
            return self._copied(node, self._as_it_is)
        if target is aten.bmm.default:
            return self._copied(node, self._as_it_is, aten.matmul.default)
        if target in BROADCASTING or torch.Tag.pointwise in getattr(target, "tags", ()):
            return self._copied(node, self._as_it_is)
        return self._copied(node, lambda v: self._as_it_is(v) if isinstance(v, _Size) else self._of_rows(v))

    def _of_rows(self, value: _Value) -> fx.Node:
        """A value with B rows: the user's row is repeated."""
        if value.of == "user":
            return self._repeated(value.new, value.old.meta["val"])
        if value.new is None:
            value.new = self._whole(value)
        return value.new

    def _repeated(self, node: fx.Node, shaped: torch.Tensor) -> fx.Node:
        rows = shaped.shape[0] if shaped.dim() else 1
        if not isinstance(rows, torch.SymInt):
            return node
        if rows.node.expr != self._symbol:
            raise _Cannot("rows of another number")
        return self._call(aten.expand.default, node, [self._rows, *[-1] * (shaped.dim() - 1)])

    def _whole(self, value: _Value) -> fx.Node:
        """What is divided, put together."""
        if isinstance(value, _Columns):
            repeated = self._call(aten.expand.default, value.user, [self._rows, -1])
            joined = self._call(aten.cat.default, [repeated, value.rows], 1)
            order = torch.tensor([*value.places[0], *value.places[1]]).argsort()
            return self._call(aten.index_select.default, joined, 1, self._tensor(order))
        assert isinstance(value, _Stack)
        stack = self._call(aten.stack.default, [self._of_rows(part) for part in value.parts], 1)
        if value.step == "stack":
            return stack
        turned = self._call(aten.transpose.int, stack, 1, 2)
        if value.step == "transposed":
            return turned
        products = self._call(aten.bmm.default, stack, turned)
        return products if value.step == "products" else self._call(aten.flatten.using_ints, products, 1)

    def _divided(self, node: fx.Node) -> _Value | None:
        """What user and rows have a part in, kept apart; None: it is not such an operator."""
        target, args = node.target, node.args
        if target in (aten.cat.default, aten.stack.default):
            return self._joined(node)
        first = self._value(args[0]) if args and isinstance(args[0], fx.Node) else None
        if isinstance(first, _Columns) and target is aten.linear.default:
            return self._linear(node, first, *map(self._value, args[1:]))
        if not isinstance(first, _Stack):
            return None
        step: Step | None = None
        if target is aten.bmm.default:
            other = self._value(args[1])
            if isinstance(other, _Stack) and other.parts is first.parts:
                step = "products" if (first.step, other.step) == ("stack", "transposed") else None
        elif (first.step, target, *args[1:]) == ("stack", aten.transpose.int, 1, 2):
            step = "transposed"
        elif (first.step, target, *args[1:]) == ("products", aten.flatten.using_ints, 1):
            step = "flat"
        elif (first.step, target, args[1]) == ("flat", aten.index_select.default, 1):
            return self._pairs(node, first.parts, self._constant(self._value(args[2])).tolist())
        return _Stack("rows", node, parts=first.parts, step=step) if step else None

    def _joined(self, node: fx.Node) -> _Value | None:
        """Vectors as columns of one, or as a stack."""
        parts, dim = list(map(self._value, node.args[0])), (*node.args[1:], 0)[0]
        if any(part.old.meta["val"].dim() != 2 for part in parts):
            return None
        if node.target is aten.cat.default:
            return self._cat(node, parts) if dim in (1, -1) else None
        divided = dim == 1 and {part.of for part in parts} == {"user", "rows"}
        return _Stack("rows", node, parts=parts) if divided else None

    def _cat(self, node: fx.Node, parts: list[_Value]) -> _Value | None:
        """Columns of parts, one after the other."""
        users, rows, start = [], [], 0
        places: tuple[list[int], list[int]] = ([], [])
        for part in parts:
            width = part.old.meta["val"].shape[1]
            if isinstance(part, _Columns):
                users.append(part.user)
                rows.append(part.rows)
                for mine, theirs in zip(places, part.places, strict=True):
                    mine += [start + place for place in theirs]
            elif part.of == "none":
                return None
            else:
                (users if part.of == "user" else rows).append(self._as_it_is(part))
                places[part.of == "rows"].extend(range(start, start + width))
            start += width
        if not users or not rows:
            return None
        user, of_rows = (self._call(aten.cat.default, each, 1) for each in (users, rows))
        return _Columns("rows", node, user=user, rows=of_rows, places=places)

    def _linear(self, node: fx.Node, x: _Columns, weight: _Value, bias: _Value | None = None) -> _Value:
        whole = self._constant(weight)
        of_user, of_rows = (self._tensor(whole[:, each].contiguous()) for each in x.places)
        user = self._call(aten.linear.default, x.user, of_user, bias and bias.new)
        rows = self._call(aten.linear.default, x.rows, of_rows)
        return _Value("rows", node, self._call(aten.add.Tensor, rows, user))

    def _pairs(self, node: fx.Node, parts: list[_Value], wanted: list[int]) -> _Value:
        """Products of pairs of n vectors, each i · n + j."""
        n = len(parts)
        users = [i for i, part in enumerate(parts) if part.of == "user"]
        rows = [i for i in range(n) if i not in users]
        order = {part: place for place, part in enumerate([*users, *rows])}
        places, of_user, of_rows = ([], []), [], []
        for place, (i, j) in enumerate(divmod(pair, n) for pair in wanted):
            if i in users and j in users:
                places[0].append(place)
                of_user.append(order[i] * len(users) + order[j])
            else:
                i, j = (i, j) if i in rows else (j, i)
                places[1].append(place)
                of_rows.append((order[i] - len(users)) * n + order[j])
        user = self._call(aten.cat.default, [self._as_it_is(parts[i]) for i in users], 0)
        theirs = self._call(aten.stack.default, [self._of_rows(parts[i]) for i in rows], 1)
        with_user = self._call(aten.matmul.default, theirs, self._call(aten.t.default, user))
        own = self._call(aten.bmm.default, theirs, self._call(aten.transpose.int, theirs, 1, 2))
        products = self._call(aten.flatten.using_ints, self._call(aten.cat.default, [with_user, own], 2), 1)
        own_rows = self._call(aten.index_select.default, products, 1, self._tensor(torch.tensor(of_rows)))
        if not of_user:
            return _Value("rows", node, own_rows)
        users_own = self._call(aten.matmul.default, user, self._call(aten.t.default, user))
        flat = self._call(aten.view.default, users_own, [1, -1])
        return _Columns(
            "rows",
            node,
            user=self._call(aten.index_select.default, flat, 1, self._tensor(torch.tensor(of_user))),
            rows=own_rows,
            places=places,
        )

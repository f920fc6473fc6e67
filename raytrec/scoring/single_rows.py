"""Rewriting of programs so that the part that depends only on the user is computed once.

A program of torch.export is a list of operators over tensors of B rows. If some inputs have a single row (the
user's), an operator on such inputs alone also returns a single row. Pointwise operators and matrix products
broadcast that row. Before any other operator on user and candidates, the row is repeated B times.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from raytrec.scoring.manifest import Input

aten = torch.ops.aten
BROADCASTING_OPERATORS = {aten.einsum.default, aten.matmul.default}
# Tolerance and rows of the comparison with the whole program, on random inputs.
COMPARISON_TOLERANCE, NUM_COMPARED_ROWS = 1e-5, 5
Program = Callable[..., tuple[torch.Tensor, ...]]
ValueOrigin = Literal["user", "rows", "none"]


def rewrite_for_single_rows(program: fx.GraphModule, inputs: Sequence[Input], once: Collection[int]) -> Program | None:
    """Return a program that takes a single row of some inputs, or None if the program cannot be rewritten.

    Args:
        program: Graph of ExportedProgram.module().
        inputs: Inputs of the program.
        once: Positions of the inputs with a single row.
    """
    torch_state = torch.random.get_rng_state()
    try:
        rewritten = _ProgramRewriter(program, once).result()
        examples = [make_example_input(each, 1 if i in once else NUM_COMPARED_ROWS) for i, each in enumerate(inputs)]
        repeated = [t.expand(NUM_COMPARED_ROWS, *t.shape[1:]).contiguous() for t in examples]
        with torch.inference_mode():
            pairs = zip(rewritten(*examples), program.forward(*repeated), strict=True)
            same = all(a.shape == b.shape and _is_close(a, b) for a, b in pairs)
    except (_UnsupportedProgram, RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None
    finally:
        torch.random.set_rng_state(torch_state)
    return rewritten if same else None


def _is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.allclose(actual, expected, rtol=COMPARISON_TOLERANCE, atol=COMPARISON_TOLERANCE, equal_nan=True))


def make_example_input(of: Input, rows: int) -> torch.Tensor:
    """Return a random tensor with the shape and dtype of an input."""
    if of.kind == "present":
        return torch.arange(of.length) < torch.arange(rows).unsqueeze(1) + 1
    if of.kind in ("dense", "bag"):
        return torch.randn(rows, of.width)
    dtype = torch.float64 if of.kind == "side_features" else torch.float32
    return torch.randn(rows, of.length, of.width, dtype=dtype)


class _UnsupportedProgram(Exception):
    """Error for parts of a program that the rewriting does not support."""


@dataclass
class _TensorValue:
    """Tensor of the program.

    Attributes:
        origin: user (one row), rows (B rows), or none if neither applies, such as for a weight.
        old: Node of the program.
        new: Node of the rewritten program.
    """

    origin: ValueOrigin
    old: fx.Node
    new: fx.Node


@dataclass
class _SymbolicSize:
    """Size that depends on the number of rows.

    Attributes:
        user: Size for a single row.
        rows: Node of the size for B rows; None for a size of a user tensor.
    """

    user: int
    rows: fx.Node | None


class _ProgramRewriter:
    """Rewriter of one program, node by node."""

    def __init__(self, program: fx.GraphModule, once: Collection[int]):
        self._program, self._graph = program, fx.Graph()
        self._values: dict[fx.Node, _TensorValue | _SymbolicSize] = {}
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        for place, node in enumerate(placeholders):
            origin: ValueOrigin = "user" if place in once else "rows"
            self._values[node] = _TensorValue(origin, node, self._graph.placeholder(f"input_{place}"))
        first_rows = next(node for place, node in enumerate(placeholders) if place not in once)
        self._symbol = first_rows.meta["val"].shape[0].node.expr
        self._rows = self._graph.call_function(aten.sym_size.int, (self._expand(self._values[first_rows]), 0))

    def result(self) -> Program:
        """Return the rewritten program."""
        for node in self._program.graph.nodes:
            if node.op == "get_attr":
                self._values[node] = _TensorValue("none", node, self._graph.get_attr(node.target))
            elif node.op == "call_function":
                self._values[node] = self._rewrite_node(node)
            elif node.op == "output":
                self._graph.output(fx.map_arg(node.args[0], lambda a: self._expand(self._values[a])))
            elif node.op != "placeholder":
                raise _UnsupportedProgram(node.op)
        self._graph.eliminate_dead_code()
        attributes = {node.target for node in self._program.graph.nodes if node.op == "get_attr"}
        root = {name: operator.attrgetter(name)(self._program) for name in attributes}
        return fx.GraphModule(root, self._graph).forward

    def _rewrite_node(self, node: fx.Node) -> _TensorValue | _SymbolicSize:
        arguments = [self._values[each] for each in node.all_input_nodes]
        if isinstance(node.meta.get("val"), torch.SymInt):
            return self._make_size(node, arguments)
        kinds = {value.origin for value in arguments if isinstance(value, _TensorValue)}
        if "rows" not in kinds:
            origin: ValueOrigin = (
                "user" if "user" in kinds or any(isinstance(v, _SymbolicSize) for v in arguments) else "none"
            )
            return _TensorValue(
                origin, node, self._copy(node, lambda v: v.user if isinstance(v, _SymbolicSize) else v.new)
            )
        broadcasts = node.target in BROADCASTING_OPERATORS or torch.Tag.pointwise in getattr(node.target, "tags", ())
        if node.target is aten.bmm.default and "user" in kinds:
            return _TensorValue("rows", node, self._copy(node, self._get_node, aten.matmul.default))
        return _TensorValue("rows", node, self._copy(node, self._get_node if broadcasts else self._expand))

    def _make_size(self, node: fx.Node, arguments: list[_TensorValue | _SymbolicSize]) -> _SymbolicSize:
        expression = node.meta["val"].node.expr
        user = int(expression.subs({self._symbol: 1}))
        if expression == self._symbol:
            return _SymbolicSize(user, self._rows)
        if any(isinstance(v, _TensorValue) and v.origin == "user" for v in arguments):
            return _SymbolicSize(user, None)
        return _SymbolicSize(user, self._copy(node, self._get_node))

    def _copy(self, node: fx.Node, argument: Callable[[Any], Any], target: Any = None) -> fx.Node:
        args, kwargs = (fx.map_arg(a, lambda n: argument(self._values[n])) for a in (node.args, node.kwargs))
        return self._graph.create_node("call_function", target or node.target, args, kwargs)

    def _get_node(self, value: _TensorValue | _SymbolicSize) -> fx.Node:
        """Return the node of a tensor, with a single row for the user's, or of a size for B rows."""
        if isinstance(value, _TensorValue):
            return value.new
        if value.rows is None:
            raise _UnsupportedProgram("a size of the user's tensor")
        return value.rows

    def _expand(self, value: _TensorValue | _SymbolicSize) -> fx.Node:
        """Return the node of a tensor with B rows, which repeats the user's row, or of a size for B rows."""
        if isinstance(value, _SymbolicSize) or value.origin != "user":
            return self._get_node(value)
        shape = value.old.meta["val"].shape
        if not shape or not isinstance(shape[0], torch.SymInt):
            return value.new
        if shape[0].node.expr != self._symbol:
            raise _UnsupportedProgram("a tensor with a different number of rows")
        sizes = [self._rows, *[-1] * (len(shape) - 1)]
        return self._graph.call_function(aten.expand.default, (value.new, sizes))

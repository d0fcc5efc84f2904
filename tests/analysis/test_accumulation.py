"""Which gradients are added up by their own calls, as if they were made and then added."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from merakc.analysis.accumulation import ADDING, ONEDNN, SCORES, accumulated
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.kernels.ops import compiled_call

SPEC = TensorSpec((4, 4), torch.float64)
X = Ref("x")
ROWS = torch.tensor([[1, 0, 3], [3, 3, 2]])


def graph(*nodes: Node, outputs: tuple[Output, ...]) -> Graph:
    return Graph((Input("x", InputKind.BATCH, SPEC, "x"),), nodes, outputs)


def product(name: str) -> Node:
    return Node(name, "aten.mm.default", (X, X), (), (SPEC,))


def gradient(name: str, of: str) -> Output:
    return Output(name, OutputKind.GRADIENT, Ref(of))


def test_products_that_are_gradients_and_nothing_else_are() -> None:
    made = graph(
        *map(product, ("a", "b", "c", "d", "e")),
        Node("f", "aten.exp.default", (Ref("b"),), (), (SPEC,)),
        outputs=(
            gradient("alone", "a"),
            gradient("read", "b"),
            gradient("twice", "c"),
            Output("again", OutputKind.SAVED, Ref("c")),
            gradient("an activation", "d"),
            Output("result", OutputKind.RESULT, Ref("e")),
            gradient("no product", "f"),
        ),
    )
    parameters = {o.name for o in made.outputs} - {"an activation"}
    assert accumulated(made, parameters) == {"alone": "a"}


@pytest.mark.parametrize("by_frequency", [False, True])
def test_a_table_is_where_rows_count_alike(by_frequency: bool) -> None:
    op = "aten.embedding_dense_backward.default"
    made = graph(
        Node("a", op, (X, X, 4, -1, by_frequency), (), (SPEC,)), outputs=(gradient("w", "a"),)
    )
    assert bool(accumulated(made, {"w"})) is not by_frequency


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


ARGS: list[tuple[str, tuple[Any, ...]]] = [
    ("aten.mm.default", (numbers(4, 5).t(), numbers(4, 6))),
    (ONEDNN, (numbers(4, 5).t().float(), numbers(4, 6).float())),
    ("aten.bmm.default", (numbers(2, 4, 5), numbers(2, 5, 6))),
    ("aten.embedding_dense_backward.default", (numbers(2, 3, 6), ROWS, 5, -1, False)),
    ("aten.embedding_dense_backward.default", (numbers(2, 3, 6), ROWS, 5, 3, False)),
    ("aten.embedding_dense_backward.default", (numbers(6), ROWS[0, 0], 5, -1, False)),
    (
        SCORES,
        (numbers(4), numbers(4), numbers(4, 6), numbers(5, 6), None, torch.arange(4), numbers(4),
         0, False, True, True, False),
    ),
]  # fmt: skip


def first(made: Any) -> torch.Tensor:
    """What is added up: of several results the first."""
    return made if isinstance(made, torch.Tensor) else made[0]


@pytest.mark.parametrize(("op", "args"), ARGS)
def test_they_make_write_and_add(op: str, args: tuple[Any, ...]) -> None:
    wanted = first(compiled_call(op)(*args))
    torch.testing.assert_close(first(ADDING[op](None, False, *args)), wanted)
    total = torch.full_like(wanted, torch.nan)
    assert first(ADDING[op](total, False, *args)) is total
    torch.testing.assert_close(total, wanted)
    assert first(ADDING[op](total, True, *args)) is total
    torch.testing.assert_close(total, 2 * wanted)


def test_every_op_is_tried() -> None:
    assert {op for op, _ in ARGS} == ADDING.keys()

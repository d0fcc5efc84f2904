"""The notation of rules: what it says, and where it is wrong."""

from __future__ import annotations

import pytest
import torch

from merakc.errors import RuleError
from merakc.kernels.ops import resolve_op
from merakc.passes.sharding.notation import parse_row
from merakc.passes.sharding.rows import POINTWISE, Along, Last, Row, Whole
from merakc.passes.sharding.rules import ROWS

SCHEMA = torch._C.parse_schema(
    "mylib::mix(Tensor x, int k, Tensor w, Tensor? bias=None, int dim=0) -> (Tensor, Tensor)"
)
ONE = torch._C.parse_schema("mylib::one(Tensor x, Tensor[] more) -> Tensor")


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("pointwise", POINTWISE),
        (" along(dim) ", Along("dim")),
        ("last(2)", Last(2)),
        ("whole(it reads all of it)", Whole("it reads all of it")),
        ("... i!, o i!, ?o -> ... o, ...", "... i!, o i!, ?o -> ... o, ..."),
        ("b, b, ?b -> , b", "b, b, ?b -> , b"),
    ],
)
def test_rules_that_fit(text: str, row: Row) -> None:
    assert parse_row(text, SCHEMA) == row


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("b i, i b, ?b", 13, "one '->'"),
        ("b -> b -> b", 12, "one '->'"),
        ("b, b -> b, b", 1, "2 arguments, where the op has 3 tensors (x, w, bias)"),
        ("b, b, ?b -> b", 12, "1 outputs, where the op has 2"),
        ("b, b, b -> b, b", 7, "'bias' may be None"),
        ("b, ?b, ?b -> b, b", 4, "no dim of argument 'w'"),
        ("b 3d, b, ?b -> b, b", 3, "'3d' is no dim of argument 'x'"),
        ("b ..., b, ?b -> b, b", 3, "'...' is no dim"),
        ("b b, b, ?b -> b, b", 3, "'b' twice in one argument"),
        ("b, b, ?b -> b c, b", 15, "no argument has the dim 'c'"),
        ("b, b, ?b -> b!, b", 13, "no argument has the dim 'b!'"),
        ("b, b, ?b -> b b, b", 15, "'b' twice in one output"),
        ("b, b, ?b -> ... b, b", 13, "no argument has the dim '...'"),
        ("b i, b i, ?b -> b, b", 3, "argument 'bias' lacks it"),
        ("along(axis)", 7, "no argument 'axis' (there are x, k, w, bias, dim)"),
        ("last(two)", 6, "'two' is no number"),
        ("whole( )", 7, "a reason is needed"),
        ("pointwize", 10, "one '->'"),
    ],
)
def test_rules_that_do_not_fit_say_where(text: str, place: int, what: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse_row(text, SCHEMA)
    lines = str(caught.value).splitlines()
    assert what in lines[0]
    assert f"character {place}:" in lines[0]
    assert lines[2].index("^") - 4 == place - 1


def test_a_list_of_tensors_is_no_argument_of_an_einsum() -> None:
    assert parse_row("b -> b", ONE) == "b -> b"
    with pytest.raises(RuleError, match="2 arguments"):
        parse_row("b, b -> b", ONE)


# One of their arguments lacks the summed dim, which users' rules are refused for: linear's bias is
# added once by the op's local form, and a grouped product's offsets are not added at all.
NOT_ALL_SUMMED = ("aten.linear.default", "merakc.grouped_mm.default")


def test_the_table_keeps_to_the_notation() -> None:
    for op, row in ROWS.items():
        if isinstance(row, str) and row != POINTWISE and op not in NOT_ALL_SUMMED:
            schema = resolve_op(op)._schema  # type: ignore[attr-defined]
            assert parse_row(row, schema) == row

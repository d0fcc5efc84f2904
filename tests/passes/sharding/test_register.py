"""Ops of users: registered by name, split like any other, trained like in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ranks import run_ranks
from merakc import register_sharding
from merakc.errors import RuleError
from merakc.ir.graph import Ref
from merakc.passes.sharding.factors import leaves
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.rules import row_of
from merakc.passes.sharding.shard import sharding_of
from tests.passes.lockstep import relative_error
from tests.passes.rule_cases import randn
from tests.passes.sharding.test_rules import build, check, splittable

PAGE = Path(__file__).parents[3] / "docs" / "ops.md"
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@torch.library.custom_op("merakc_test::scaled", mutates_args=())
def scaled(x: Tensor, times: int, scale: Tensor | None = None) -> Tensor:
    return x * times if scale is None else x * times * scale


@scaled.register_fake
def _(x: Tensor, times: int, scale: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    x, scale = ctx.saved_tensors
    return grad * ctx.times * scale, None, (grad * x * ctx.times).sum(0)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.times, scale = inputs
    ctx.save_for_backward(x, scale)


scaled.register_autograd(_backward, setup_context=_save)
torch.library.define("merakc_test::parts", "(Tensor x) -> Tensor")
torch.library.define("merakc_test::parts.two", "(Tensor x, Tensor y) -> Tensor")
torch.library.define("merakc_test::forms.a", "(Tensor x) -> Tensor")
torch.library.define("merakc_test::forms.b", "(Tensor x, Tensor y) -> Tensor")
register_sharding(scaled, "b h, ?h -> b h")


@pytest.mark.parametrize("tp", [2, 3])
def test_a_registered_op_is_split(tp: int) -> None:
    graph, values = build("merakc_test.scaled.default", (randn(4, 7), 3, randn(7)))
    dims = propagate(graph)
    assert not dims.opaque
    free = splittable(dims, tp)
    assert len(free) == 2
    for factors in free:
        check(graph, values, sharding_of(dims, factors, tp))


def test_an_op_is_named_in_several_ways() -> None:
    register_sharding("merakc_test::parts", "n -> n")
    assert row_of("merakc_test.parts.default") == "n -> n"
    register_sharding("merakc_test.parts.two", "n, n -> n")
    register_sharding(torch.ops.merakc_test.parts.two, "n, n -> n")  # once more is no change
    assert row_of("merakc_test.parts.two") == "n, n -> n"
    register_sharding(torch.ops.merakc_test.parts, "n -> n")


@pytest.mark.parametrize("op", ["merakc_test::absent", "nowhere::op", "parts", 3, "parts::"])
def test_an_unknown_op_is_refused(op: Any) -> None:
    with pytest.raises(RuleError, match=r"no op .*give 'namespace::name'"):
        register_sharding(op, "n -> n")


def test_an_overload_must_be_named_where_none_is_the_default() -> None:
    with pytest.raises(RuleError, match=r"overloads \(a, b\): name one"):
        register_sharding("merakc_test::forms", "n -> n")


def test_another_rule_than_the_one_there_is_is_refused() -> None:
    register_sharding(torch.ops.aten.mm.default, "m i, i n -> m n")
    with pytest.raises(RuleError, match="has a sharding rule"):
        register_sharding("aten::mm", "m i!, i! n -> m n")
    with pytest.raises(RuleError, match="has a sharding rule"):
        register_sharding("aten::gelu", "last(1)")
    with pytest.raises(RuleError, match="it needs no rule"):
        register_sharding("aten::einsum", "pointwise")


def test_a_call_that_its_rule_does_not_fit_is_refused_with_its_line() -> None:
    graph, _ = build("merakc_test.scaled.default", (randn(2, 4, 7), 3, randn(7)))
    with pytest.raises(
        RuleError, match=r"model.py:1: .*does not fit this call: \[2, 4, 7\], \[7\]"
    ):
        propagate(graph)


def test_the_dims_are_those_of_the_rule() -> None:
    graph, _ = build("merakc_test.scaled.default", (randn(4, 7), 3, randn(7)))
    of = propagate(graph).of
    assert leaves(of[Ref("x0")][1]) == leaves(of[Ref("x1")][0]) == leaves(of[Ref("y")][1])


def _run_example() -> tuple[Tensor, dict[str, Tensor], str]:
    """The page's example on this rank: loss, whole gradients, how `scale` is split."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(EXAMPLE, "docs/ops.md", "exec"), names)
    model = names["model"]
    return names["loss"].detach(), model.full_gradients(), str(model.plan.splits.get("scale"))


def test_the_example_of_the_page_trains_on_two_ranks_as_on_one() -> None:
    ((loss, grads, whole),) = run_ranks(1, _run_example)
    results = run_ranks(2, _run_example)
    assert whole == "None"
    assert [split for _, _, split in results] == ["54*"] * 2
    for found, _, _ in results:
        assert relative_error(found, loss) < 1e-12
    assert grads.keys() == results[0][1].keys() == {
        "scale", "up.weight", "up.bias", "down.weight", "down.bias"
    }  # fmt: skip
    for name, wanted in grads.items():
        assert relative_error(results[0][1][name], wanted) < 1e-10, name

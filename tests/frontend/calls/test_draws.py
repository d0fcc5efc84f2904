"""Random calls: what they draw, by their statistics, and what is known before they draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.frontend.calls.draws import FILLS, OPS, SIZED
from merakc.frontend.record import record
from merakc.ir.graph import Graph
from merakc.kernels.ops import resolve_op
from tests.frontend.against_eager import inputs_of, run_graph
from tests.frontend.small import Small, linear, randn

N = 40_000
F64 = torch.float64
X = torch.full((N,), 0.5, dtype=F64)


def drawn(call: Callable[[Tensor], Tensor], x: Tensor = X) -> Tensor:
    """What a call gives of x, run from the recorded graph."""
    model = Small(lambda s, x: call(x))
    graph = record(model, (x,), {}).graph
    aten = [n.op.split(".")[1] for n in graph.nodes if n.op.startswith("aten.")]
    assert not {*SIZED, *FILLS}.intersection(aten)
    (out,) = run_graph(graph, inputs_of(graph, model, (x,), {})).outputs.values()
    return out.double()


SQRT_12 = math.sqrt(12)
# A call, and the mean and standard deviation of what it draws.
REAL: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "rand": (lambda x: torch.rand(N, dtype=F64), 0.5, 1 / SQRT_12),
    "rand in float32": (lambda x: torch.rand((N,)), 0.5, 1 / SQRT_12),
    "rand_like": (lambda x: torch.rand_like(x), 0.5, 1 / SQRT_12),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(2, 5), 3.5, 3 / SQRT_12),
    "new uniform_": (lambda x: x.new_empty(N).uniform_(), 0.5, 1 / SQRT_12),
    "out": (lambda x: torch.rand(N, out=torch.empty(N)), 0.5, 1 / SQRT_12),
    "randn": (lambda x: torch.randn(N), 0.0, 1.0),
    "randn_like": (lambda x: torch.randn_like(x, dtype=torch.float32), 0.0, 1.0),
    "normal_": (lambda x: torch.empty_like(x).normal_(3, 2), 3.0, 2.0),
    "normal": (lambda x: torch.normal(1.0, 2.0, (N,)), 1.0, 2.0),
    "normal of means": (lambda x: torch.normal(x, 2.0), 0.5, 2.0),
    "normal of deviations": (lambda x: torch.normal(1.0, x), 1.0, 0.5),
    "normal of both": (lambda x: torch.normal(x, x), 0.5, 0.5),
    "bernoulli of tensor": (lambda x: torch.bernoulli(x * 0.5), 0.25, math.sqrt(3) / 4),
    "bernoulli": (lambda x: torch.bernoulli(x, 0.25), 0.25, math.sqrt(3) / 4),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.25), 0.25, math.sqrt(3) / 4),
    "bernoulli_ of tensor": (
        lambda x: torch.empty_like(x).bernoulli_(x * 0.5), 0.25, math.sqrt(3) / 4),
    "bernoulli_ of integers": (
        lambda x: torch.zeros(N, dtype=torch.int64).bernoulli_(0.25), 0.25, math.sqrt(3) / 4),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "geometric_": (lambda x: torch.empty_like(x).geometric_(0.25), 4.0, math.sqrt(12)),
    "log_normal_": (
        lambda x: torch.empty_like(x).log_normal_(0.0, 0.5).log(), 0.0, 0.5),
    "cauchy_": (
        lambda x: (torch.empty_like(x).cauchy_(1.0, 2.0) < 3.0).double(), 0.75, math.sqrt(3) / 4),
    "randint": (lambda x: torch.randint(2, 8, (N,)), 4.5, math.sqrt(35 / 12)),
    "randint from 0": (lambda x: torch.randint(6, (N,)), 2.5, math.sqrt(35 / 12)),
    "randint_like": (lambda x: torch.randint_like(x, 2, 8), 4.5, math.sqrt(35 / 12)),
    "random_": (lambda x: torch.empty_like(x).random_(2, 8), 4.5, math.sqrt(35 / 12)),
    "random_ from 0": (lambda x: torch.empty_like(x).random_(6), 2.5, math.sqrt(35 / 12)),
    "dropout": (lambda x: F.dropout(x, 0.25), 0.5, math.sqrt(1 / 12)),
    "dropout_": (lambda x: F.dropout(x * 1, 0.25, inplace=True), 0.5, math.sqrt(1 / 12)),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.25, True)[0], 0.5, math.sqrt(1 / 12)),
    "alpha_dropout": (lambda x: F.alpha_dropout(torch.randn_like(x), 0.25, True), 0.0, 1.0),
    "rrelu": (lambda x: -F.rrelu(-x, 0.2, 0.6, True), 0.2, 0.2 / SQRT_12),
    "gumbel": (
        lambda x: F.gumbel_softmax(x.log().expand(3, -1).T, hard=True)[:, 0], 1 / 3,
        math.sqrt(2) / 3),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_mean_and_deviation(name: str) -> None:
    call, mean, deviation = REAL[name]
    found = drawn(call)
    assert found.shape == (N,)
    assert found.mean().item() == pytest.approx(mean, abs=5 * deviation / math.sqrt(N))
    assert found.std().item() == pytest.approx(deviation, rel=0.1)
    assert len(found.unique()) > 1


def test_integers_have_equal_shares() -> None:
    values, counts = drawn(lambda x: torch.randint(2, 8, (N,))).unique(return_counts=True)
    assert values.tolist() == [2, 3, 4, 5, 6, 7]
    assert (counts / N - 1 / 6).abs().max() < 5 * math.sqrt(5 / 36 / N)


def test_bounds_may_be_tensors() -> None:
    found = drawn(lambda x: torch.randint_like(x, torch.tensor(6)))
    assert found.unique().tolist() == [0, 1, 2, 3, 4, 5]


def test_permutations_hold_every_number_once() -> None:
    found = drawn(lambda x: torch.randperm(1000))
    assert not torch.equal(found, torch.arange(1000.0))
    assert torch.equal(found.sort().values, torch.arange(1000, dtype=F64))


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial_draws_by_probability(replacement: bool) -> None:
    weights = torch.tensor([1.0, 0.0, 3.0, 4.0])
    found = drawn(lambda x: torch.multinomial(x.expand(N, 4), 2, replacement), weights)
    assert found.shape == (N, 2)
    shares = torch.stack([(found[:, 0] == k).double().mean() for k in range(4)])
    assert (shares - weights / 8).abs().max() < 5 * 0.5 / math.sqrt(N)
    assert shares[1] == 0
    same = (found[:, 0] == found[:, 1]).double().mean().item()
    expected = (weights / 8).square().sum().item() if replacement else 0.0
    assert same == pytest.approx(expected, abs=5 * 0.5 * replacement / math.sqrt(N))


def test_one_multinomial_sample() -> None:
    found = drawn(lambda x: torch.multinomial(x.expand(N, 4), 1), torch.tensor([1.0, 0, 3, 4]))
    assert (found == 2).double().mean().item() == pytest.approx(3 / 8, abs=5 * 0.5 / math.sqrt(N))


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda x: F.dropout1d(x, 0.5, True), (300, 5, 4)),
        (lambda x: F.dropout2d(x, 0.5, True), (300, 5, 4, 3)),
        (lambda x: F.dropout3d(x, 0.5, True), (300, 5, 4, 3, 2)),
    ],
)
def test_channels_are_dropped_whole(
    call: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    found = drawn(call, torch.ones(shape)).flatten(2)
    assert torch.equal(found, found[..., :1].expand_as(found))
    assert sorted(found.unique().tolist()) == [0.0, 2.0]
    assert found.mean().item() == pytest.approx(1.0, abs=5 / math.sqrt(1500))


def test_feature_alpha_dropout_drops_channels_to_one_value() -> None:
    found = drawn(lambda x: F.feature_alpha_dropout(x, 0.5, True), torch.ones(300, 5, 4))
    assert torch.equal(found, found[..., :1].expand_as(found))
    assert len(found.unique()) == 2


def test_drop_path_drops_samples() -> None:
    def drop_path(x: Tensor) -> Tensor:
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        mask = 0.75 + torch.rand(shape, dtype=x.dtype)
        mask.floor_()
        return x.div(0.75) * mask

    found = drawn(drop_path, torch.ones(2000, 3, 2)).flatten(1)
    assert torch.equal(found, found[:, :1].expand_as(found))
    assert found.mean().item() == pytest.approx(1.0, abs=5 * math.sqrt(1 / 3 / 2000))


def test_calls_draw_apart_from_each_other() -> None:
    found = drawn(lambda x: (torch.rand_like(x) == torch.rand_like(x)).double())
    assert found.sum() == 0


def test_gradients_pass_through_arithmetic_on_draws() -> None:
    model = Small(
        lambda s, x: (F.rrelu(s.scale * x, 0.2, 0.6, True) + torch.native_dropout(s.scale * x, 0.5,
                      True)[0]).sum(),
        scale=nn.Parameter(torch.tensor(2.0, dtype=F64)),
    )  # fmt: skip
    graph = record(model, (-X,), {}).graph
    found = run_graph(graph, inputs_of(graph, model, (-X,), {}))
    assert found.gradients["scale"].item() == pytest.approx(found.outputs["output"].item() / 2)


def test_nothing_is_drawn_in_eval_mode_or_with_probability_0() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.dropout(s.layer(x), 0.0) + F.dropout(x, 0.5, training=False)
        return (y + F.alpha_dropout(y, 0.5) + torch.native_dropout(y, 0.5, False)[0]).sum()

    graph = record(Small(forward, layer=linear()), (randn(4, 6),), {}).graph
    assert not any(n.op.startswith("merakc.") for n in graph.nodes)
    assert all(i.name not in ("seed", "first_sample") for i in graph.inputs)


def test_rrelu_in_eval_mode_has_the_mean_slope() -> None:
    assert drawn(lambda x: F.rrelu(-x, 0.2, 0.6))[0].item() == pytest.approx(-0.2)


# ------------------------------------------------------------------ dropped layers


def layer_drop(rate: float, draw: Callable[[], Tensor], before: bool) -> Graph:
    def forward(s: Any, x: Tensor) -> Tensor:
        for layer in s.layers:
            number = draw()
            if (number < rate) if before else not (rate <= number):
                continue
            x = layer(x)
        return x.sum()

    model = Small(forward, layers=nn.ModuleList([linear(), linear()]))
    return record(model, (randn(4, 6),), {}).graph


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand([]), lambda: torch.rand(1), lambda: torch.empty(()).uniform_(0, 1)],
)
def test_a_probability_of_0_drops_no_layer(draw: Callable[[], Tensor], before: bool) -> None:
    assert sum(n.op == "aten.linear.default" for n in layer_drop(0.0, draw, before).nodes) == 2


@pytest.mark.parametrize("before", [True, False])
def test_a_probability_of_1_drops_every_layer(before: bool) -> None:
    found = layer_drop(1.0, lambda: torch.rand([]), before)
    assert all(n.op != "aten.linear.default" for n in found.nodes)


@pytest.mark.parametrize(
    "comparison",
    ["x < -1", "x <= -1", "x > -1", "x >= -1", "x < 0", "x <= 0", "x > 0", "x >= 0", "x < 1",
     "x <= 1", "x > 1", "x >= 1", "x < 2", "x >= 2"],
)  # fmt: skip
def test_comparisons_known_are_those_of_every_number(comparison: str) -> None:
    def forward(s: Any, x: Tensor) -> tuple[Tensor, bool]:
        return s.layer(x).sum(), bool(eval(comparison, {"x": torch.rand([])}))

    _, outcome = record(Small(forward, layer=linear()), (randn(4, 6),), {}).outputs
    assert [outcome] * 2 == [eval(comparison, {"x": x}) for x in (2.0**-53, 0.999)]


def test_numbers_drawn_by_themselves_are_never_0() -> None:
    """Of 2,000 with 8 bits each, some 8 would be."""
    found = drawn(lambda x: torch.cat([torch.rand(1, dtype=torch.bfloat16) for _ in range(2000)]))
    assert found.min() == 2.0**-8


@pytest.mark.parametrize("comparison", ["x < 0.5", "x > 0.999"])
def test_comparisons_that_numbers_answer_differently_are_refused(comparison: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.layer(x).sum() * bool(eval(comparison, {"x": torch.rand([])}))

    with pytest.raises(Exception, match=r"a random number.*\(layerdrop\) to 0"):
        record(Small(forward, layer=linear()), (randn(4, 6),), {})


def test_masks_are_drawn_whatever_they_are_compared_with() -> None:
    assert drawn(lambda x: (torch.rand_like(x) < 0.0).double()).sum() == 0


@pytest.mark.parametrize("op", OPS)
def test_the_ops_named_exist(op: str) -> None:
    assert torch.Tag.nondeterministic_seeded in resolve_op(op).tags  # type: ignore[attr-defined]


@pytest.mark.parametrize("packet", [*SIZED, *FILLS])
def test_the_packets_named_exist(packet: str) -> None:
    assert hasattr(torch.ops.aten, packet) or hasattr(torch.ops.aten, f"{packet}_")

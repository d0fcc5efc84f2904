"""Which products are in float8, and what stands in their place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import MODELS
from merakc.frontend.record import record
from merakc.ir.batches import BatchSplit
from merakc.ir.graph import Graph
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.forward.scaled_products import scaled_weights, with_scaled_products
from tests.kernels.float8.test_scaled import Recipe
from tests.recorded import one_of_several

F32 = torch.float32
Forward = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """Weights of several shapes, and what is made of them."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.square, self.narrow = (nn.Parameter(torch.randn(32, n)) for n in (32, 8))
        self.given = forward

    def forward(self, x: Tensor) -> Tensor:
        """A mean of what is made."""
        return self.given(self, x).mean()


def graph_of(forward: Forward, *shape: int) -> Graph:
    return record(Layers(forward), (torch.ones(shape or (4, 32)),), {}).graph


def routed(m: Layers, x: Tensor) -> Tensor:
    chosen = (x @ m.square).softmax(-1).topk(2).indices
    return m.last(m.first(x) * chosen.sum(-1, keepdim=True))


CASES: dict[str, tuple[Forward, set[str]]] = {
    "all but the last": (lambda m, x: m.last(m.first(x) @ m.square), {"first.weight", "square"}),
    "none where there is one": (lambda m, x: m.last(x), set()),
    "all before a product of activations": (
        lambda m, x: m.first(x) @ m.last(x).t(), {"first.weight", "last.weight"},
    ),
    "two that are last": (lambda m, x: m.first(x) + m.last(x), set()),
    "none of narrow weights": (lambda m, x: m.last((x @ m.narrow) @ m.narrow.t()), set()),
    "none that something is chosen by": (routed, {"first.weight"}),
    "none that is the last somewhere": (lambda m, x: m.first(m.last(m.first(x))), {"last.weight"}),
    "none of which a weight is the rows": (
        lambda m, x: m.last(m.square @ x.expand(8, 4, 32).flatten(0, 1)), set(),
    ),
    "those of a weight that is turned": (lambda m, x: m.last(x @ m.square.t()), {"square"}),
    "none of other numbers": (lambda m, x: m.last((x.double() @ m.square.double()).float()), set()),
    "none that is multiplied by a vector, too": (
        lambda m, x: m.last(x[0] @ m.square + x @ m.square), set(),
    ),
    "none of vectors": (lambda m, x: m.last((x[0] @ m.square).expand(4, 32)), set()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_which_weights(case: str) -> None:
    forward, names = CASES[case]
    assert scaled_weights(graph_of(forward), F32, None) == names


def test_models() -> None:
    """All weights of layers but routers and experts, and neither tables nor scores."""
    for name, per_layer, left in (
        ("gpt2", 4, ("wte", "lm_head")), ("llama", 7, ("embed", "lm_head")),
        ("mixtral", 4, ("gate", "experts", "lm_head")),
    ):  # fmt: skip
        case = MODELS[name]
        found = scaled_weights(record(case.model(), (), case.batch(2)).graph, F32, None)
        assert len(found) == 4 * per_layer
        assert not any(part in weight for weight in found for part in left)


def written(forward: Forward, *names: str) -> Graph:
    return with_scaled_products(BatchSplit(graph_of(forward), scaled=frozenset(names))).graph


def test_what_stands_in_their_place() -> None:
    graph = written(
        lambda m, x: m.last(torch.addmm(m.first.bias, m.first(x), m.square) @ m.square),
        "first.weight", "square",
    )  # fmt: skip
    ops = [n.op.split(".")[1] for n in graph.nodes]
    assert ops == [
        "scaled_linear", "add", "t", "scaled_linear", "add", "t", "scaled_linear", "linear", "mean",
    ]  # fmt: skip
    graph.verify()
    assert written(lambda m, x: m.last(m.first(x))) == graph_of(lambda m, x: m.last(m.first(x)))


def test_they_compute_the_recipe() -> None:
    def forward(m: Layers, x: Tensor) -> Tensor:
        return m.last(torch.addmm(m.last.bias, m.first(x), m.square))

    model, x = Layers(forward), torch.randn(4, 32)
    graph = written(forward, "first.weight", "square")
    own = dict(model.named_parameters())
    (found,) = interpret(graph, {i.name: own.get(i.target, x) for i in graph.inputs})
    y = Recipe.apply(x, model.first.weight) + model.first.bias
    y = Recipe.apply(y, model.square.t().contiguous()) + model.last.bias
    torch.testing.assert_close(found, model.last(y).mean())


def test_what_is_the_same_for_all_samples_is_left() -> None:
    """Of rows that all samples share every micro-batch would round its part of a gradient."""

    def forward(m: Layers, x: Tensor) -> Tensor:
        return m.last(m.first(x) + x.new_ones(1, 32) @ m.square)

    recording = one_of_several(Layers(forward), (torch.ones(4, 32),))
    assert recording.found is not None
    assert scaled_weights(recording.graph, F32, recording.found.states) == {"first.weight"}
    assert scaled_weights(recording.graph, F32, None) == {"first.weight", "square"}

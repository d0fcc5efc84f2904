"""Forwards are written so that what depends on the batch alone stands apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.batches.normalise import COPIES, normalised
from tests.passes.batches.forwards import Loss, Small, make_batch, recorded
from tests.passes.batches.modules import compare

FORWARDS: dict[str, tuple[Loss, str]] = {
    "mean over labels": (lambda m, z, b: F.cross_entropy(z, b["missing"]), "cross_entropy_loss"),
    "weighed classes": (
        lambda m, z, b: F.cross_entropy(z, b["missing"], weight=m.weights, label_smoothing=0.1),
        "cross_entropy_loss"),
    "an ignored class": (
        lambda m, z, b: F.cross_entropy(z, b["label"], ignore_index=2), "cross_entropy_loss"),
    "probabilities": (
        lambda m, z, b: F.cross_entropy(z, b["target"].softmax(1)), "cross_entropy_loss"),
    "negative likelihood": (
        lambda m, z, b: F.nll_loss(z.log_softmax(1), b["missing"], weight=m.weights),
        "nll_loss_forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARDS)
def test_a_mean_over_labels_is_a_sum_over_their_count(name: str) -> None:
    loss, op = FORWARDS[name]
    model, batch = Small(loss), make_batch()
    graph = recorded(model, batch, 8)
    made = normalised(graph)
    made.verify()
    (summed,) = [n for n in made.nodes if n.op.split(".")[1] == op]
    (quotient,) = [n for n in made.nodes if n.op == "aten.div.Tensor"]
    assert summed.name == f"{quotient.name}.summed"
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    values = [
        interpret(g, {i.name: state[i.target] for i in g.inputs})[0].detach() for g in (graph, made)
    ]
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=0)
    grads = [n.name for n in made.nodes if n.name.startswith(f"{quotient.name}.") and n.grad]
    assert grads == [summed.name], "counts have no gradient"


@pytest.mark.parametrize("weighed", [False, True])
def test_a_derivative_in_the_forward_divides_by_their_count(weighed: bool) -> None:
    def loss(m: nn.Module, z: Tensor, b: dict[str, Tensor]) -> Tensor:
        weight = m.weights if weighed else None

        def mean(z: Tensor) -> Tensor:
            return F.cross_entropy(z, b["missing"], weight=weight)

        return torch.func.grad(mean)(z).square().sum()

    model, batch = Small(loss), make_batch()
    graph = recorded(model, batch, 8)
    made = normalised(graph)
    made.verify()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    values = [
        interpret(g, {i.name: state[i.target] for i in g.inputs})[0].detach() for g in (graph, made)
    ]
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_sums_and_single_losses_stay(reduction: str) -> None:
    model = Small(lambda m, z, b: F.cross_entropy(z, b["label"], reduction=reduction).sum())
    graph = recorded(model, make_batch(), 8)
    assert normalised(graph) == graph


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda z: z.new_zeros(len(z)), 0), (lambda z: torch.ones_like(z[:, 0]), 1),
        (lambda z: torch.full_like(z[:, 0], 2.5), 2.5), (lambda z: z.new_full((3,), 7), 7),
        (lambda z: torch.zeros_like(z[:, 0], dtype=torch.bool), False),
    ],
)  # fmt: skip
def test_what_is_made_in_the_shape_of_another_reads_nothing(make: object, value: object) -> None:
    graph = recorded(Small(lambda m, z, b: z.sum() + make(z).sum()), make_batch(), 8)  # type: ignore[operator]
    assert any("like" in n.op or "new_" in n.op for n in graph.nodes)
    (filled,) = [n for n in normalised(graph).nodes if n.op == "aten.full.default"]
    assert not filled.refs
    assert filled.args[1] == value
    assert type(filled.args[1]) is type(value)


X = torch.randn(4, 6, dtype=torch.float64)


class Shifted(nn.Module):
    """Predicts what comes next, as causal language models do; joins with an empty tail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """`x` [n, 6]."""
        y = self.linear(x)
        kept, rest = y[..., :6], y[..., 6:]
        y = torch.cat([kept, rest], -1)
        made, wanted = y[..., :-1].contiguous().view(-1), x[..., 1:].contiguous().view(-1)
        return {"loss": (made - wanted).pow(2).mean()}


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_any_size_take_the_path_of_the_batch(parts: int) -> None:
    assert compare(Shifted(), {"x": X}, parts).head is None


class Detached(nn.Module):
    """A copy that ends a gradient, and windows of memory as it lies."""

    def __init__(self, windows: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.windows = windows

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """`x` [n, 6]."""
        y = x * self.weight
        with torch.no_grad():
            scale = y.clone()
        z = (y * scale.t().contiguous().reshape(-1, 6)).sum()
        if self.windows:
            z = z + y.as_strided_scatter(y[:2, :3] * 2, (2, 3), (6, 1)).sum()
        return {"loss": z}


def _copies(windows: bool) -> int:
    graph = normalised(record(Detached(windows), (), {"x": X}).graph, copies=False)
    return sum(n.op in COPIES for n in graph.nodes)


def test_copies_that_end_gradients_or_lie_in_memory_are_kept() -> None:
    assert _copies(windows=False) == 1
    assert _copies(windows=True) == 2


class Steps(nn.Module):
    """A loss whose kernel wants its scores in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """`x` [n, 3, 6], `y` [n, 3]."""
        scores = self.linear(x).log_softmax(-1).transpose(1, 2).contiguous()
        return {"loss": F.nll_loss(scores[..., None], y[..., None])}


@pytest.mark.parametrize("parts", [2, 4])
def test_a_copy_that_a_kernel_needs_is_kept(parts: int) -> None:
    batch = {"x": torch.randn(4, 3, 6, dtype=torch.float64), "y": torch.arange(12).view(4, 3) % 5}
    assert compare(Steps(), batch, parts).head is None


def test_what_is_empty_may_say_the_dtype() -> None:
    model = Small(
        lambda m, z, b: torch.cat([torch.zeros(len(z), 0), z.bfloat16(), z[:, :0].half()], 1).sum()
    )
    made = normalised(recorded(model, make_batch(), 8))
    (join,) = [n for n in made.nodes if n.op == "aten.cat.default"]
    assert len(join.args[0]) == 3
    model = Small(lambda m, z, b: torch.cat([z[:, :0], z], 1).sum())
    made = normalised(recorded(model, make_batch(), 8))
    (join,) = [n for n in made.nodes if n.op == "aten.cat.default"]
    assert len(join.args[0]) == 1

"""The rewritten losses of the micro-batches add up to that of the batch, and so do gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from merakc.batches import named_tensors, split_batch
from merakc.frontend.record import record
from merakc.ir.graph import InputKind, OutputKind
from merakc.passes.interpret import interpret
from merakc.passes.weigh_loss import MICRO_BATCH_SCALE, WeighedLoss, weigh_loss
from merakc.planner import training_graph

SAMPLES, WORDS, WIDTH, CLASSES = 6, 5, 4, 3
RELATIVE = 1e-12
Batch = dict[str, Tensor]
Loss = Callable[["Model", Tensor, Batch], Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
        self.register_buffer("weights", torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64))
        self.weights: Tensor
        self.loss = loss

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self, self.layer(batch["x"]), batch)}


def make_batch(seed: int = 0, kept: list[bool] | None = None) -> Batch:
    """`kept` says which labels are valid, in order; by default about half."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (SAMPLES, WORDS), generator=draw)
    valid = torch.rand(labels.shape, generator=draw) < 0.5
    valid[0, 0] = True
    if kept is not None:
        valid = torch.tensor(kept).view(labels.shape)
    return {
        "x": torch.randn(SAMPLES, WORDS, WIDTH, generator=draw, dtype=torch.float64),
        "y": torch.randn(SAMPLES, WORDS, CLASSES, generator=draw, dtype=torch.float64),
        "labels": labels.masked_fill(~valid, -100),
        "number": valid.sum(),
    }


def whole(model: Model, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    loss = model(**batch)["loss"]
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def state_of(model: Model) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def counted(weighed: WeighedLoss, model: Model, parts: list[Batch]) -> dict[str, Tensor]:
    """The scalar inputs, as the runtime fills them in."""
    scales = {MICRO_BATCH_SCALE: torch.tensor(1 / len(parts), dtype=torch.float64)}
    counts = weighed.counts
    if counts is None:
        return scales
    state = state_of(model)
    totals: dict[str, Tensor] = {}
    for part in parts:
        given = {i.name: part.get(i.target, state.get(i.target)) for i in counts.inputs}
        given |= counts.constants
        for out, value in zip(counts.outputs, interpret(counts, given), strict=True):
            assert value.shape == ()
            totals[out.name] = totals.get(out.name, 0) + value
    return scales | {name: 1 / total for name, total in totals.items()}


def summed(
    model: Model, batch: Batch, micro_batches: int
) -> tuple[Tensor, list[Tensor], WeighedLoss]:
    """Loss and gradients added up over the micro-batches of the weighed graph."""
    parts = [named_tensors((), kwargs) for _, kwargs in split_batch((), batch, micro_batches)]
    weighed = weigh_loss(training_graph(record(model, (), parts[0]).graph))
    weighed.graph.verify()
    scales = counted(weighed, model, parts)
    state = state_of(model)
    loss = torch.zeros((), dtype=torch.float64)
    for part in parts:
        given = {}
        for item in weighed.graph.inputs:
            known = {InputKind.BATCH: part, InputKind.SCALAR: scales}.get(item.kind, state)
            if item.name not in weighed.graph.constants:
                given[item.name] = known[item.target]
        (own,) = interpret(weighed.graph, given)
        loss = loss + own
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters()))), weighed


def check(
    loss: Loss, batch: Batch, micro_batches: int = 3, relative: float = RELATIVE
) -> WeighedLoss:
    torch.manual_seed(0)
    model = Model(loss)
    found, found_grads, weighed = summed(model, batch, micro_batches)
    wanted, wanted_grads = whole(model, batch)
    for a, b in zip([found, *found_grads], [wanted, *wanted_grads], strict=True):
        torch.testing.assert_close(a, b, rtol=relative, atol=relative / 100)
    return weighed


def entropy(logits: Tensor, batch: Batch, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), **options)


def masked_mean(m: Model, logits: Tensor, batch: Batch) -> Tensor:
    mask = batch["labels"] != -100
    each = (logits - batch["y"]).square().mean(-1)
    return (each * mask).sum() / mask.sum()


LOSSES: dict[str, Loss] = {
    "mean": lambda m, p, b: entropy(p, b),
    "class weights": lambda m, p, b: entropy(p, b, weight=m.weights),
    "smoothing": lambda m, p, b: entropy(p, b, label_smoothing=0.2),
    "weights and smoothing": lambda m, p, b: entropy(p, b, weight=m.weights, label_smoothing=0.2),
    "ignored class": lambda m, p, b: entropy(
        p, {"labels": b["labels"].clamp(min=0)}, ignore_index=1
    ),
    "classes in dim 1": lambda m, p, b: F.cross_entropy(p.transpose(1, 2), b["labels"]),
    "sum": lambda m, p, b: entropy(p, b, reduction="sum"),
    "sum over a number given": lambda m, p, b: entropy(p, b, reduction="sum") / b["number"],
    "nll": lambda m, p, b: F.nll_loss(
        p.log_softmax(-1).flatten(0, 1), b["labels"].flatten(), weight=m.weights
    ),
    "nll in dim 1": lambda m, p, b: F.nll_loss(p.log_softmax(-1).transpose(1, 2), b["labels"]),
    "probabilities": lambda m, p, b: F.cross_entropy(
        p.flatten(0, 1), b["y"].softmax(-1).flatten(0, 1)
    ),
    "mse": lambda m, p, b: F.mse_loss(p, b["y"]),
    "mse sum": lambda m, p, b: F.mse_loss(p, b["y"], reduction="sum"),
    "huber sum": lambda m, p, b: F.huber_loss(p, b["y"], reduction="sum"),
    "l1": lambda m, p, b: F.l1_loss(p, b["y"]),
    "l1 sum": lambda m, p, b: F.l1_loss(p, b["y"], reduction="sum"),
    "bce": lambda m, p, b: F.binary_cross_entropy_with_logits(p, b["y"].sigmoid()),
    "kl": lambda m, p, b: F.kl_div(p.log_softmax(-1), b["y"].softmax(-1), reduction="batchmean"),
    "plus auxiliary mean": lambda m, p, b: entropy(p, b) + 0.1 * p.square().mean(),
    "minus twice": lambda m, p, b: torch.sub(entropy(p, b), F.mse_loss(p, b["y"]), alpha=2),
    "plus a number": lambda m, p, b: entropy(p, b) + 3.0,
    "plus a value without gradient": lambda m, p, b: entropy(p, b) + b["y"].mean(),
    "python's sum": lambda m, p, b: sum([entropy(p, b), F.mse_loss(p, b["y"])]),
    "stacked": lambda m, p, b: torch.stack([entropy(p, b), F.mse_loss(p, b["y"])]).sum(),
    "stacked mean": lambda m, p, b: torch.stack([entropy(p, b), 3 * entropy(p, b)]).mean(),
    "scaled": lambda m, p, b: -(entropy(p, b) * 0.3) / 7,
    "scaled by a tensor": lambda m, p, b: m.weights[1] * entropy(p, b),
    "twice the same": lambda m, p, b: (lambda ce: ce + ce)(entropy(p, b)),
    "reshaped": lambda m, p, b: entropy(p, b).reshape(1).clone().squeeze(),
    "masked mean": masked_mean,
    "half a masked mean": lambda m, p, b: masked_mean(m, p, b) / 2,
    "guarded masked mean": lambda m, p, b: (
        (p.square().sum(-1) * (b["labels"] >= 0)).sum() / (b["labels"] >= 0).sum().clamp(min=1)
    ),
    "sum over samples": lambda m, p, b: p.square().sum() / b["x"].shape[0],
    "sum over elements": lambda m, p, b: p.square().sum() / p.numel(),
    "sum over a constant": lambda m, p, b: p.square().sum() / 7,
    "mean over samples, then sum": lambda m, p, b: (p.square().mean(0) * 2).sum(),
    "sum over words, then mean": lambda m, p, b: p.square().sum((1, 2)).mean(),
    "sum over samples, then mean": lambda m, p, b: p.square().sum(0).mean(),
    "sum over samples and words, then mean": lambda m, p, b: p.square().sum((0, 1)).mean(),
    "mean over words, sum over samples": lambda m, p, b: p.square().mean(1).sum(0).mean(),
    "mean over samples, mean over words, sum": lambda m, p, b: p.square().mean(0).mean(0).sum(),
    "einsum": lambda m, p, b: torch.einsum("bwc,bwc->", p, b["y"]),
    "mean over a mask's mean": lambda m, p, b: (
        (p.square().sum(-1) * (b["labels"] >= 0)).mean() / (b["labels"] >= 0).double().mean()
    ),
    "plus a penalty": lambda m, p, b: entropy(p, b) + 0.1 * m.layer.weight.square().sum(),
    "plus penalties": lambda m, p, b: (
        p.square().mean() + 1e-2 * sum(q.abs().sum() for q in m.layer.parameters())
    ),
    "penalty by torch's loss": lambda m, p, b: (
        p.square().sum() + F.mse_loss(m.layer.bias, m.weights, reduction="sum")
    ),
    "stacked penalties": lambda m, p, b: (
        entropy(p, b) + torch.stack([q.square().sum() for q in m.layer.parameters()]).sum()
    ),
    "dot": lambda m, p, b: p.flatten().dot(b["y"].flatten()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up(name: str) -> None:
    check(LOSSES[name], make_batch())


@pytest.mark.parametrize("name", ["mean", "class weights", "weights and smoothing", "nll"])
@settings(max_examples=8)
@given(
    kept=st.lists(st.booleans(), min_size=SAMPLES * WORDS, max_size=SAMPLES * WORDS).filter(any),
    micro_batches=st.sampled_from([1, 2, 3, 6]),
)
def test_any_labels_may_be_missing(name: str, kept: list[bool], micro_batches: int) -> None:
    check(LOSSES[name], make_batch(kept=kept), micro_batches)


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    kept = [True] * (2 * WORDS) + [False] * ((SAMPLES - 2) * WORDS)
    check(LOSSES["mean"], make_batch(kept=kept))
    check(LOSSES["masked mean"], make_batch(kept=kept))


def test_a_function_of_the_loss_is_averaged_over_micro_batches() -> None:
    model = Model(lambda m, p, b: entropy(p, b).exp())
    batch = make_batch()
    found, _, _ = summed(model, batch, 3)
    parts = [kwargs for _, kwargs in split_batch((), batch, 3)]
    wanted = torch.stack([model(**part)["loss"] for part in parts]).mean()
    torch.testing.assert_close(found, wanted.detach(), rtol=RELATIVE, atol=0)


def test_a_loss_recorded_without_gradients_adds_up_as_well() -> None:
    batch = make_batch()
    model = Model(LOSSES["plus auxiliary mean"])
    with torch.no_grad():
        parts = [kwargs for _, kwargs in split_batch((), batch, 3)]
        weighed = weigh_loss(training_graph(record(model, (), parts[0]).graph))
        scales = counted(weighed, model, parts)
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            given = {
                i.name: {**part, **state_of(model), **scales}[i.target]
                for i in weighed.graph.inputs
            }
            total += interpret(weighed.graph, given)[0]
        torch.testing.assert_close(total, model(**batch)["loss"], rtol=RELATIVE, atol=0)


def test_other_outputs_keep_their_values() -> None:
    class Both(Model):
        def forward(self, **batch: Tensor) -> dict[str, Tensor]:
            loss = entropy(self.layer(batch["x"]), batch)
            return {"loss": loss * 2, "entropy": loss, "perplexity": loss.exp()}

    model, batch = Both(LOSSES["mean"]), make_batch()
    weighed = weigh_loss(record(model, (), batch).graph)
    given = {
        i.name: {**batch, **state_of(model), **counted(weighed, model, [batch])}[i.target]
        for i in weighed.graph.inputs
    }
    outs = interpret(weighed.graph, given)
    found = dict(zip([o.name for o in weighed.graph.outputs], outs, strict=True))
    for name, value in model(**batch).items():
        torch.testing.assert_close(found[name], value, rtol=RELATIVE, atol=0)


def test_a_scale_is_of_the_dtype_that_it_is_multiplied_with() -> None:
    def loss(m: Model, p: Tensor, b: Batch) -> Tensor:
        return p.square().mean() + p.float().square().mean().double()

    graph = check(loss, make_batch(), relative=1e-6).graph
    scales = [i for i in graph.inputs if i.kind is InputKind.SCALAR]
    assert {i.target for i in scales} == {MICRO_BATCH_SCALE}
    assert {i.spec.dtype for i in scales} == {torch.float32, torch.float64}


def test_the_names_of_counts_are_those_of_the_scales() -> None:
    weighed = check(LOSSES["plus auxiliary mean"], make_batch())
    assert weighed.counts is not None
    targets = {i.target for i in weighed.graph.inputs if i.kind is InputKind.SCALAR}
    assert targets == {MICRO_BATCH_SCALE, "loss_scale:cross_entropy_loss"}
    assert [o.name for o in weighed.counts.outputs] == ["loss_scale:cross_entropy_loss"]
    assert [i.name for i in weighed.counts.inputs] == ["labels"]


def test_a_graph_without_a_loss_is_left_alone() -> None:
    graph = record(nn.Linear(2, 2), (torch.ones(1, 2),), {}).graph
    assert all(o.kind is not OutputKind.LOSS for o in graph.outputs)
    assert weigh_loss(graph) == WeighedLoss(graph, None)

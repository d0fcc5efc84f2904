"""Several calls of one model whose outputs make one loss: views, pairs, triplets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import Tensors, assert_close, build, gradients
from tests.train.outside.small import Normed, X, Y, alike, normed

MORE = torch.randn(24, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore:the forward of .* returns no loss")


class Embedder(nn.Module):
    """Two outputs of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Tensors:
        """What is predicted, and what from."""
        z = torch.tanh(self.second(torch.tanh(self.first(x))))
        return {"p": self.last(z), "z": z}


def views(model: Any) -> torch.Tensor:
    """Of two views, each the target of the other (SimSiam), told from those of others (InfoNCE)."""
    one, two = model(X), model(X.flip(1))
    towards = [
        -F.cosine_similarity(a["p"], b["p"].detach(), dim=-1).mean()
        for a, b in ((one, two), (two, one))
    ]
    a, b = (F.normalize(each["z"], dim=-1) for each in (one, two))
    return sum(towards) / 2 + F.cross_entropy(a @ b.T / 0.1, torch.arange(len(X)))


def guessed(model: Any) -> torch.Tensor:
    """Of samples with labels, and of three times as many whose labels are guessed (FixMatch)."""
    told, weak, strong = model(X)["p"], model(MORE)["p"], model(MORE * 1.1)["p"]
    with torch.no_grad():
        sure, labels = weak.softmax(-1).max(-1)
    lost = F.cross_entropy(strong, labels, reduction="none") * (sure > 0.34)
    return F.cross_entropy(told, Y) + lost.mean()


def triplets(model: Any) -> torch.Tensor:
    anchor, near, far = (model(x)["z"] for x in (X, X + 0.1, X.flip(0)))
    return F.triplet_margin_loss(anchor, near, far, margin=2.0)


LOSSES = views, guessed, triplets


def trained(model: Any) -> tuple[list[float], int]:
    """The losses of two steps of each kind; how many steps were compiled for them."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for loss_of in LOSSES * 2:
        loss = loss_of(model)
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    steps = getattr(model, "_steps", None)
    return found, len(steps.compiled) if steps is not None else 0


def on_ranks(options: dict[str, Any]) -> tuple[list[float], int, Tensors]:
    whole = options.get("dp", 1) > 1
    model = merakc.auto_parallel(
        build(Embedder), X, cluster=NOMINAL_CPU, whole_batches=whole, **options
    )
    return *trained(model), model.full_state_dict()


@pytest.mark.parametrize(
    "options",
    [{"tp": 2}, {"pp": 2, "micro_batches": 2}, {"dp": 2, "state_shards": "zero-1"}],
    ids=str,
)
def test_one_step_is_taken_for_the_losses_of_several_calls(options: dict[str, Any]) -> None:
    plain = build(Embedder)
    wanted, _ = trained(plain)
    (losses, compiled, state), (others, *_) = run_ranks(2, lambda: on_ranks(options))
    assert losses == others == pytest.approx(wanted, rel=1e-12)
    assert_close(state, plain.state_dict())
    assert compiled == 1 + 2 + len(LOSSES)  # the plan's, forwards of two sizes, and these


def in_another_order(model: Any) -> float:
    """Of calls that write buffers: in the order of the calls, whatever their outputs' is."""
    one, two, three = model(X), model(X.flip(0) * 2), model(X - 1)
    early = (one.detach() + 0).sum().item()
    loss = (three * 2 - one).square().mean() + (two - one).square().mean()
    loss.backward()
    return round(early + loss.item(), 12)


class Counting(Normed):
    """Its outputs follow from how often it was called."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits, that much larger."""
        self.calls.add_(1)
        return super().forward(x) * self.calls.clone()


def unused(model: Any) -> float:
    """One of the calls makes no loss, and another is trained by itself."""
    one, two, three = model(X), model(X * 2), model(X + 1)
    seen = F.cosine_similarity(two.detach(), one.detach(), dim=-1).mean().item()
    (F.cross_entropy(one, Y) + F.mse_loss(three, one)).backward()
    F.cross_entropy(two, Y).backward()
    return round(seen, 12)


def test_calls_that_write_buffers() -> None:
    for each in (in_another_order, unused):
        alike(each)
    ours = merakc.auto_parallel(build(Counting), X, cluster=NOMINAL_CPU, dp=1)
    plain = build(Counting)
    assert in_another_order(ours) == in_another_order(plain)
    assert_close(ours.full_gradients(), gradients(plain))
    assert_close(ours.full_state_dict(), plain.state_dict())


def consistent(model: Any, read: Callable[[Any, torch.Tensor], object]) -> float:
    """Two calls with one batch are to say the same (R-Drop)."""
    one, two = model(X), model(X)
    loss = F.cross_entropy(one["p"], Y) + (one["z"] - two["z"]).square().mean()
    read(one, loss)
    loss.backward()
    return loss.item()


class Dropping(Embedder):
    """With dropout."""

    def forward(self, x: torch.Tensor) -> Tensors:
        """The same."""
        z = F.dropout(torch.tanh(self.first(x)), 0.5, self.training)
        return {"p": self.last(z), "z": z}


def test_calls_of_one_step_draw_each_its_own() -> None:
    losses, grads = [], []
    for parts in (1, 2):
        torch.manual_seed(0)
        model = merakc.auto_parallel(
            build(Dropping), X, cluster=NOMINAL_CPU, dp=1, micro_batches=parts
        )
        losses.append([consistent(model, lambda *_: None) for _ in range(2)])
        losses[-1].append(consistent(model, lambda _, loss: loss.item()))
        grads.append(model.full_gradients())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert_close(*grads)
    with torch.no_grad():
        alone = F.cross_entropy(model.eval()(X)["p"], Y).item()
    assert min(losses[0]) > alone * 1.05  # two masks are not one
    model.train()
    with pytest.raises(ConfigError, match="draws random numbers"):
        consistent(model, lambda one, _: one["p"].sum().item())


class Summing(nn.Module):
    """Keeps the mean of what it has seen, and gives it with its outputs."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs, and what was seen with them."""
        out: torch.Tensor = self.layer(x)
        self.seen = 0.5 * self.seen + 0.5 * out.detach().mean(0)
        return out + self.seen


@pytest.mark.parametrize("between", [True, False])
def test_nothing_else_writes_buffers_between_the_calls_of_a_step(between: bool) -> None:
    ours = merakc.auto_parallel(build(Summing), X, cluster=NOMINAL_CPU, dp=1)
    plain = build(Summing)
    losses = []
    for model in (plain, ours):
        one = model(X)
        if between:
            model(X * 3)
        two = model(X * 2)
        losses.append((one * two).mean())
    if between:
        with pytest.raises(ConfigError, match="wrote buffers that the model's outputs are made"):
            losses[1].backward()
        return
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-12)
    assert_close(ours.full_gradients(), gradients(plain))
    assert_close(ours.full_state_dict(), plain.state_dict())


def remembered(model: Any) -> float:
    """An output of a step that was taken, in the loss of the next."""
    first = model(X)
    kept = first.detach()
    F.cross_entropy(first, Y).backward()
    loss = (model(X * 2) - kept).square().mean()
    loss.backward()
    return round(loss.item(), 12)


def test_detached_outputs_of_an_earlier_step() -> None:
    alike(remembered)


def under_autocast(model: Any) -> float:
    """Gone back through outside the block, as torch's pages do."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(X).float().square().mean()
    loss.backward()
    return loss.item()


def test_backward_may_stand_behind_autocast() -> None:
    ours, plain = normed(), build(Normed)
    assert under_autocast(ours) == pytest.approx(under_autocast(plain), rel=1e-2)
    for name, wanted in gradients(plain).items():
        torch.testing.assert_close(ours.full_gradients()[name], wanted, rtol=0.1, atol=1e-2)


def two_calls(what: str) -> None:
    model = normed(dropout=0.5) if what == "draws and writes" else normed()
    batch = X.clone()
    one = model(batch)
    if what == "mode":
        model.eval()
    two = model(X * 2)
    if what == "batch":
        batch.zero_()
    loss = (one * two).mean()
    if what == "weights":
        with torch.no_grad():
            model.get_parameter("last.bias").add_(1.0)
    loss.backward()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("draws and writes", "draws random numbers"),
        ("mode", "together with a tensor that requires a gradient"),
        ("batch", "the batch, the model's weights or modes were changed"),
        ("weights", "the batch, the model's weights or modes were changed"),
    ],
)
def test_what_is_refused(what: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        two_calls(what)


def test_labels_are_to_be_left_out() -> None:
    class Labelled(Embedder):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:  # type: ignore[override]
            out = super().forward(x)["p"]
            return {"logits": out} if labels is None else {
                "loss": F.cross_entropy(out, labels), "logits": out}  # fmt: skip

    batch = {"x": X, "labels": Y}
    model = merakc.auto_parallel(build(Labelled), batch, cluster=NOMINAL_CPU, dp=1)
    one, two = model(**batch), model(**batch)
    with pytest.raises(ConfigError, match="leave the labels out"):
        (one["loss"] + F.mse_loss(one["logits"], two["logits"])).backward()
    model.zero_grad()
    for each in (model, plain := build(Labelled)):
        one, two = each(X), each(X * 2)
        (F.cross_entropy(one["logits"], Y) + F.mse_loss(one["logits"], two["logits"])).backward()
    assert_close(model.full_gradients(), gradients(plain))

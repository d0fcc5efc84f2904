from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import PlanError
from merakc.frontend import record
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import (
    WIDTH,
    WORDS,
    Tensors,
    Words,
    assert_close,
    build,
    first_part,
    gradients,
    parallel,
    part,
    warm_up,
    words,
)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


class Gauge(nn.Module):
    """Multiplies by a statistic that it keeps: its backward wants the value from before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A scalar, and a new statistic: the mean size of what passed."""
        y = x.square() * self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.5).add_(x.abs().mean(0))
        return y.mean()


class Moving(nn.Module):
    """A gauge at the end of residual blocks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.gauge = Gauge()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss alone."""
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        loss: torch.Tensor = self.gauge(x)
        return loss


def ramp(batch_size: int = 8) -> torch.Tensor:
    return torch.linspace(-1, 1, batch_size * WIDTH).double().view(batch_size, WIDTH)


def train(kind: str, options: dict[str, Any]) -> tuple[list[float], Tensors, Tensors]:
    make, batch = {
        "words": (lambda: Words(dropout=0.5), words(0)),
        "moving": (lambda: Moving(0.3), {"x": ramp()}),
    }[kind]
    model = parallel(make, batch, micro_batches=4, **options)
    losses = []
    for _ in range(2):
        model.zero_grad()
        out = model(**batch)
        loss = out if isinstance(out, torch.Tensor) else out["loss"]
        loss.backward()
        losses.append(loss.item())
    return losses, model.full_gradients(), model.full_state_dict()


OWN_ORDER = """
0F0 0F1 3F0 3B0 0F2 3F1 3I1 3W1 0F3 0R0 0B0 3F2 3B2 0B1 3F3 3I3 3W3 0I2 0B3 0W2
1F0 2F0 1F1 2F1 2I0 1I0 2R1 2B1 1F2 2F2 1F3 2F3 1W0 2W0 1B1 2B2 1B2 2B3 1B3
"""
USUAL: dict[str, Any] = {"recompute": "none", "schedule": "1f1b"}
CHANGED: list[dict[str, Any]] = [{"recompute": "stage"}, {"schedule": "gpipe"}]
OWN: list[dict[str, Any]] = [
    {"schedule": OWN_ORDER, "recompute": recompute} for recompute in ("auto", "stage")
]


def each_way(kind: str, ways: list[dict[str, Any]]) -> list[tuple[list[float], Tensors, Tensors]]:
    return [train(kind, {"pp": 2, **options}) for options in ways]


@pytest.mark.parametrize("kind", ["words", "moving"])
def test_schedules_and_recomputation_change_no_bit(kind: str) -> None:
    """And an order of the user's own, which adds up in another one, nothing but that."""
    own = OWN if kind == "words" else []
    (usual, *first), (_, *second) = run_ranks(2, each_way, kind, [USUAL, *CHANGED, *own])
    assert usual[0][0] != usual[0][1]  # dropout drew anew, or the buffer moved
    for options, one, other in zip(CHANGED, first, second, strict=False):
        assert usual[0] == one[0] == other[0], options
        for before, after in zip(usual[1:], one[1:], strict=True):
            assert before.keys() == after.keys()
            for name, value in before.items():
                assert torch.equal(value, after[name]), (options, name)
    for found in first[len(CHANGED) :]:
        assert found[0] == pytest.approx(usual[0], rel=1e-12)
        for before, after in zip(usual[1:], found[1:], strict=True):
            assert_close(after, before)


def test_a_buffer_that_is_written_and_read() -> None:
    plain = build(lambda: Moving(0.0))
    plain(ramp()).backward()  # once: every micro-batch reads what the buffer was before
    for recompute in ("none", "full", "stage"):
        model = parallel(lambda: Moving(0.0), {"x": ramp()}, micro_batches=4, recompute=recompute)
        model(ramp()).backward()
        assert_close(model.full_gradients(), gradients(plain))
        assert_close(model.full_state_dict(), plain.state_dict())


def test_seeds_give_other_masks() -> None:
    first, again, other = (
        parallel(lambda: Words(dropout=0.5), words(0), seed=seed)(**words(0))["loss"].item()
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


class Statistics(nn.Module):
    """BatchNorm in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A mean over the batch."""
        return self.last(torch.tanh(self.norm(self.first(x)))).square().mean()


def beside_ddp() -> list[tuple[float, float]]:
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    plain = DistributedDataParallel(build(Statistics))
    model = merakc.auto_parallel(build(Statistics), x[0], dp=2, cluster=NOMINAL_CPU)
    own = x[model.data_parallel_rank]
    found = []
    for training in (True, True, False):
        for each in (plain, model):
            each.train(training)
            each.zero_grad()
        ours, theirs = model(own), plain(own)
        # DDP leaves each rank its own loss.
        torch.distributed.all_reduce(theirs.data)
        found.append((ours.item(), theirs.item() / 2))
        if training:
            ours.backward()
            theirs.backward()
            for name, parameter in plain.module.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    full, kept = model.full_state_dict(), plain.module.state_dict()
    for name, value in full.items():
        torch.testing.assert_close(value, kept[name], rtol=1e-12, atol=1e-14)
    return found


def test_running_statistics_follow_ddp() -> None:
    for rank in run_ranks(2, beside_ddp):
        for ours, theirs in rank:
            assert ours == pytest.approx(theirs, rel=1e-12)


class Weighted(Words):
    """Class weights that are a buffer, held where the labels are not counted."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.register_buffer("classes", torch.linspace(0.5, 2, WORDS))
        self.classes: torch.Tensor

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Tensors:
        """Smoothed, weighted, and beside a mean over all words."""
        logits = super().forward(ids)["logits"].flatten(0, 1)
        assert labels is not None
        loss = F.cross_entropy(logits, labels.flatten(), self.classes)
        return {"loss": loss + 0.1 * logits.square().mean()}


class Pruned(nn.Module):
    """Counts, beside the samples that it keeps, hidden units that a buffer keeps and tp splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("kept", (torch.arange(4 * WIDTH) < 3 * WIDTH).to(torch.float64))
        self.kept: torch.Tensor

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """A mean over the kept units of the kept samples."""
        y = self.down(self.up(x).tanh() * self.kept)
        return (y.square().sum(1) * mask).sum() / (self.kept.sum() * mask.sum())


def pruned_batch() -> Tensors:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"x": x, "mask": (torch.arange(8) % 3 > 0).to(torch.float64)}


class Doubled(torch.autograd.Function):
    """Its backward is not what differentiating its forward would give."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class Custom(nn.Module):
    """Four blocks around a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A mean over the batch."""
        for layer in self.layers:
            x = Doubled.apply(layer(x))
        return x.square().mean()


class HalfTied(Words):
    """Its head reads the embedding, and does not train it."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Tensors:
        """The loss alone."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.norm(x) @ self.embedding.weight.detach().T
        assert labels is not None
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class OnlyTraining(Words):
    """Reads one parameter in training mode only."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.extra = nn.Linear(WORDS, 1)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Tensors:
        """With an auxiliary loss in training mode."""
        out = super().forward(ids, labels)
        if self.training:
            out["loss"] = out["loss"] + self.extra(out["logits"]).square().mean()
        return out


def given_ramp() -> Tensors:
    return {"x": ramp()}


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensors], int]] = {
    "weighted over the whole batch": (Weighted, lambda: words(0), 2),
    "counted over a split buffer": (Pruned, pruned_batch, 2),
    "with a backward of their own": (Custom, given_ramp, 1),
    "of a tied parameter that one stage does not train": (HalfTied, lambda: words(0), 1),
}
Losses = dict[str, tuple[float, Tensors]]


def loss_of(found: Any) -> torch.Tensor:
    return found if isinstance(found, torch.Tensor) else found["loss"]  # type: ignore[no-any-return]


def of_kinds(layout: dict[str, Any], kinds: list[str]) -> Losses:
    """The losses and gradients of models, of which those on two ranks fit their layout."""
    found: Losses = {}
    for kind in kinds:
        make, batch, micro_batches = KINDS[kind]
        model = parallel(make, batch(), micro_batches=micro_batches, **layout)
        loss = loss_of(model(**part(batch(), model)))
        loss.backward()
        found[kind] = loss.item(), model.full_gradients()
        if make is Pruned:
            assert model._steps.state["kept"].numel() < 4 * WIDTH
        if make is HalfTied:  # on both stages
            found["tied"] = 0.0, {"weight": model.get_parameter("embedding.weight").grad}
    if "tp" in layout:
        with pytest.raises(PlanError, match=r"reads parameter 'extra\.weight' as 1 x 16\*"):
            planned_in_eval_mode(layout)
    if "pp" in layout:
        found["read in training alone"] = planned_in_eval_mode(layout)
    return found


def planned_in_eval_mode(layout: dict[str, Any]) -> tuple[float, Tensors]:
    """Of a model that reads more in the other mode than was planned."""
    example = first_part(words(0), layout.get("dp", 1))
    model = merakc.auto_parallel(build(OnlyTraining).eval(), example, cluster=NOMINAL_CPU, **layout)
    model.train()
    loss = model(**part(words(0), model))["loss"]
    loss.backward()
    return loss.item(), model.full_gradients()


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ({"dp": 2}, [*KINDS][:1]),
        ({"tp": 2}, [*KINDS][:3]),
        ({"pp": 2, "schedule": "1f1b"}, [*KINDS][2:]),
    ],
    ids=["dp", "tp", "pp"],
)
def test_losses_and_gradients(layout: dict[str, Any], kinds: list[str]) -> None:
    first, second = run_ranks(2, of_kinds, layout, kinds)
    if "tied" in first:
        assert torch.equal(first.pop("tied")[1]["weight"], second.pop("tied")[1]["weight"])
    for kind, (loss, full) in first.items():
        make, batch, _ = KINDS.get(kind, (OnlyTraining, lambda: words(0), 1))
        plain = build(make)
        wanted = loss_of(plain(**batch()))
        wanted.backward()
        for of_rank in (loss, second[kind][0]):
            assert of_rank == pytest.approx(wanted.item(), rel=1e-12), kind
        assert_close(full, gradients(plain))


def test_a_mode_that_reads_more_than_was_planned() -> None:
    loss, full = planned_in_eval_mode({})
    plain = build(OnlyTraining)
    wanted = plain(**words(0))["loss"]
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    assert_close(full, gradients(plain))


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    plain = build(Words).to(dtype)
    model = merakc.auto_parallel(build(Words).to(dtype), words(0), cluster=NOMINAL_CPU)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        ours, wanted = model(**words(0))["loss"], plain(**words(0))["loss"]
        predicted = model.predict(**words(0))["logits"]
    ours.backward()
    wanted.backward()
    assert predicted.dtype == torch.bfloat16
    assert ours.dtype == wanted.dtype
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-2)
    for name, parameter in plain.named_parameters():
        own = model.get_parameter(name).grad
        assert own is not None
        assert parameter.grad is not None
        assert own.dtype == dtype
        error = (own - parameter.grad).float().norm() / parameter.grad.float().norm()
        assert error < 3e-2, name


class Apart(nn.Module):
    """A part that is kept out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of the part in full precision."""
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.last(y.float()).square().mean()


def test_parts_that_are_kept_out_of_autocast() -> None:
    plain = build(Apart).float()
    model = merakc.auto_parallel(build(Apart).float(), ramp().float(), cluster=NOMINAL_CPU)
    with torch.autocast("cpu", torch.bfloat16):
        ours, wanted = model(ramp().float()), plain(ramp().float())
    ours.backward()
    wanted.backward()
    own, grad = model.get_parameter("last.weight").grad, plain.last.weight.grad
    assert grad is not None
    torch.testing.assert_close(own, grad, rtol=1e-5, atol=1e-7)


def two_models() -> list[float]:
    def make() -> nn.Module:
        return Words(blocks=1)

    one, other = parallel(make, words(0), tp=2, dp=2), parallel(make, words(0), tp=4)
    return [model(**part(words(0), model))["loss"].item() for model in (one, other, one)]


def test_two_models_with_different_tensor_parallel_groups() -> None:
    plain = build(lambda: Words(blocks=1))(**words(0))["loss"].item()
    for losses in run_ranks(4, two_models):
        assert losses == pytest.approx([plain] * 3, rel=1e-12)


def test_the_shapes_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merakc.train.steps.MAX_SHAPES", 3)
    model = parallel(lambda: Words(blocks=1), words(0, 2))
    model.eval()
    wanted = {length: model(**words(0, 2, length))["loss"].item() for length in (3, 4)}
    kept = model._own("_steps").compiled
    assert len(kept) == 3  # with the planned one
    model(**words(0, 2, 3))
    first, last = [list(kept)[k] for k in (1, 2)]  # of length 4 and of length 3
    for length in (5, 6):
        model(**words(0, 2, length))
        assert len(kept) == 3
    assert first not in kept
    assert last in kept
    for length, loss in wanted.items():
        assert model(**words(0, 2, length))["loss"].item() == loss


def test_a_new_shape_runs_the_forward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the planner has compared is known."""
    found: list[int] = []
    run = record._run
    monkeypatch.setattr(record, "_run", lambda *args: found.append(1) or run(*args))
    model = parallel(lambda: Words(blocks=1), words(0, 2))
    assert len(found) == 2
    model(**words(0, 2, 9))
    assert len(found) == 3


def test_many_shapes_are_told() -> None:
    model = parallel(lambda: Words(blocks=1), words(0, 2))
    model.eval()
    for length in range(2, 9):
        model(**words(0, 2, length))
    with pytest.warns(UserWarning, match="8 shapes of batch") as told:
        model(**words(0, 2, 9))
    assert [w.filename for w in told] == [__file__]

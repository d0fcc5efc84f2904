"""Losses that are made of a model's outputs in the loop, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, MerakWarning, RecordError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.model import ParallelModel
from tests.battery.small_models import Tensors, Words, assert_close, build, warm_up, words
from tests.train.outside.small import Bare, Normed, X, Y, alike, normed

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def loop(model: Any) -> list[tuple[float, ...]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = words(step)
        outputs = model(batch["ids"])
        logits = outputs["logits"]
        size, length, width = logits.shape  # of all samples, whatever the micro-batches
        loss = F.cross_entropy(logits.view(size * length, width), batch["labels"].view(-1))
        right = logits.argmax(-1) == batch["labels"]
        early = loss.item() if step == 1 else 0.0
        total = (loss + 0.1 * outputs["x"].square().mean()) / 2
        if step == 2:  # which needs the vocabulary whole, as the plan does not: and chosen tokens
            total = total - logits.log_softmax(-1)[batch["labels"] > step].mean()
        total.backward()
        assert step != 1 or early == pytest.approx(loss.item(), rel=1e-12)
        optimizer.step()
        steps.append((total.item(), loss.item(), right.double().mean().item()))
    return steps


def trained(options: dict[str, Any]) -> tuple[list[tuple[float, ...]], Tensors, int]:
    model = merakc.auto_parallel(
        build(Bare), {"ids": words(0)["ids"]}, cluster=NOMINAL_CPU, **options
    )
    steps = loop(model)
    return steps, model.full_state_dict(), len(model._own("_steps").compiled)


@pytest.mark.filterwarnings("ignore:the forward of Bare returns no loss")
@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2, "micro_batches": 2}], ids=str)
def test_a_plain_loop_trains_as_one_process(options: dict[str, Any]) -> None:
    plain = build(Bare)
    wanted = loop(plain)
    for steps, state, compiled in run_ranks(2, trained, options):
        assert compiled == 4, "the plan's, the outputs alone, and the two kinds of step"
        for ours, theirs in zip(steps, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-11)
        if state:
            assert_close(state, plain.state_dict())


def twice(model: Any) -> float:
    loss = F.cross_entropy(model(X), Y)
    early = loss.item()
    assert not torch.isnan(loss)
    (2 * loss).backward()
    assert f"{loss:.6f}" == f"{early:.6f}"
    return round(early, 12)


def read_first(model: Any) -> list[int]:
    logits = model(X)
    chosen: list[int] = logits.argmax(1).tolist()
    total = torch.zeros((), dtype=torch.float64)
    loss = F.cross_entropy(logits, Y)
    total += loss.detach()
    torch.autograd.backward([loss])
    return chosen


def unused(model: Any) -> None:
    model(X)  # a norm's statistics come with the call
    sum(F.cross_entropy(row[None], y[None]) for row, y in zip(model(X), Y, strict=True)).backward()


def chosen(model: Any) -> None:
    """Rows chosen by the batch, by the outputs, and by the mask of what is left."""
    logits, mask = model(X), Y > 0
    losses = F.cross_entropy(logits, Y, reduction="none")
    rows = logits[mask]
    kept = F.cross_entropy(rows, Y[mask], reduction="sum") / len(rows)
    (kept + losses[losses > 1.0].sum() + logits.masked_select(~mask[:, None]).mean()).backward()


def weighted(model: Any) -> None:
    """A weight that is made without a gradient, from a view."""
    logits = model(X)
    with torch.no_grad():
        weights = (-F.cross_entropy(logits.view(-1, 3), Y, reduction="none")).exp()
    (weights * F.cross_entropy(logits, Y, reduction="none")).mean().backward()


def penalised(model: Any) -> float:
    loss = F.cross_entropy(model(X), Y) + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    return round(loss.item(), 12)


def by_grad(model: Any) -> None:
    own = list(model.parameters())
    for p, g in zip(own, torch.autograd.grad(F.cross_entropy(model(X), Y), own), strict=True):
        p.grad = 2 * g


def taught(model: Any) -> float:
    teacher = copy.deepcopy(model).requires_grad_(False)
    assert not teacher(X).requires_grad
    assert not teacher.eval()(X).requires_grad
    loss = F.mse_loss(model(X), teacher(X) + 1)
    loss.backward()
    return loss.item()


def chained(model: Any) -> float:
    before = copy.deepcopy(model)(X).detach()
    loss = F.cross_entropy(model(F.pad(before, (0, 1))), Y)
    loss.backward()
    return loss.item()


def behind_another(model: Any) -> float:
    """A step that is taken behind that of a later call, whose outputs were read before."""
    logits, other = model(X), model(X.flip(0))
    loss = F.cross_entropy(other, Y)
    loss.backward()
    total = F.mse_loss(logits, torch.zeros_like(logits) + other.detach())
    total.backward()
    return round(total.item(), 12)


def two_losses(model: Any) -> None:
    """Of one call, one by one."""
    logits = model(X)
    F.cross_entropy(logits, Y).backward(retain_graph=True)
    likely = logits.softmax(-1)
    (0.1 * likely.square().mean()).backward(retain_graph=True)
    (likely[:, 0].mean() * 2).backward()


@pytest.mark.filterwarnings("ignore:the forward of Normed returns no loss")
@pytest.mark.filterwarnings("ignore:a loss is made of outputs of a call of which a step is taken")
@pytest.mark.parametrize(
    "loop", [chosen, weighted, penalised, by_grad, taught, chained, behind_another, two_losses]
)
def test_losses_of_all_kinds(loop: Any) -> None:
    alike(loop)


def stepped(model: Any) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def of_stages() -> tuple[list[float], list[int], dict[str, torch.Tensor]]:
    """Of stages of which one alone writes buffers."""
    model = normed(pp=2, micro_batches=1)
    losses, out = stepped(model), model(X)
    out.sum().backward()
    return losses, out.argmax(-1).tolist(), model.full_state_dict()


@pytest.mark.filterwarnings("ignore:the forward of Normed returns no loss")
def test_ranks_agree_on_whether_a_forward_writes_buffers() -> None:
    plain = build(Normed)
    wanted = stepped(plain)
    best = plain(X).argmax(-1).tolist()
    (first, *found, state), (second, *others, _) = run_ranks(2, of_stages)
    assert first == second == pytest.approx(wanted, rel=1e-12)
    assert found == others == [best]
    assert_close(state, plain.state_dict())


@pytest.mark.filterwarnings("ignore:the forward of Normed returns no loss")
def test_values_may_be_read_before_and_after() -> None:
    for each in (twice, read_first, unused):
        alike(each)


@pytest.mark.filterwarnings("ignore:the forward of Normed returns no loss")
def test_draws_are_those_of_the_step() -> None:
    model = normed(dropout=0.5, micro_batches=2)
    losses = []
    for _ in range(2):
        loss = model(X).sum()
        early = loss.item()
        loss.backward()
        assert loss.item() == pytest.approx(early, rel=1e-12)
        losses.append(early)
    assert losses[0] != losses[1]


@pytest.mark.filterwarnings("ignore:the forward of Normed returns no loss")
def test_every_call_draws_anew_and_evaluation_changes_nothing() -> None:
    model, other = (normed(dropout=0.5, micro_batches=2) for _ in range(2))
    with torch.no_grad():
        guesses = [model(X) for _ in range(3)]
    guesses += [model.predict(X), model(X) + 0]
    assert len({tuple(g.flatten().tolist()) for g in guesses}) == len(guesses)
    other._own("_steps").drawn = model._own("_steps").drawn  # as a checkpoint sets it
    other.eval()(X)
    for each in (model, other.train()):
        each(X).sum().backward()
    assert_close(model.full_gradients(), other.full_gradients())


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "labels": lambda y: y.fill_(0),
    "labels by .data": lambda y: y.data.fill_(0),
    "labels by NumPy": lambda y: y.numpy().fill(0),
}


def backward_of(what: str, model: ParallelModel) -> None:
    """Does something that no step would hear of, or that it cannot know."""
    logits = model(X)
    loss = F.cross_entropy(logits, Y)
    if what == "rows":
        logits.backward()
    elif what == "no gradient":
        logits.detach().sum().backward()
    elif what == "other weights":
        with torch.no_grad():
            model.get_parameter("last.bias").add_(1.0)
        loss.backward()
    elif what == "other memory":
        bias = model.get_parameter("last.bias")
        bias.data = bias.data + 1.0
        loss.backward()
    elif what == "evaluation":
        model.eval()
        loss.backward()
    elif what == "inputs":
        loss.backward(inputs=[model.get_parameter("last.bias")])
    elif what in WRITES:
        labels = Y.clone()
        loss = F.cross_entropy(logits, labels)
        WRITES[what](labels)
        loss.backward()


@pytest.mark.filterwarnings("ignore:the forward of Normed returns no loss")
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("rows", r"backward\(\) of a tensor of shape \[8, 3\]"),
        ("no gradient", "does not require a gradient"),
        ("other weights", "were changed between the call"),
        ("other memory", "were changed between the call"),
        ("evaluation", "were changed between the call"),
        ("inputs", "with inputs"),
        *((name, "was written to before loss.backward") for name in WRITES),
    ],
)
def test_what_is_refused(what: str, told: str) -> None:
    model = normed()
    with pytest.raises(ConfigError, match=told):
        backward_of(what, model)


def written(write: Callable[[torch.Tensor], object]) -> str:
    """What a step says where the parts of weights were written to before its backward."""
    model = normed(dp=1, tp=2)
    loss = F.cross_entropy(model(X), Y)
    write(model.get_parameter("last.weight"))
    try:
        loss.backward()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:the forward of Normed returns no loss")
def test_what_is_written_by_data_counts() -> None:
    """Where ranks hold parts, which say so when they are written to."""
    for told in run_ranks(2, partial(written, lambda weight: weight.data.view(-1).add_(1.0))):
        assert "were changed between the call" in told
    assert run_ranks(2, partial(written, lambda weight: weight.data.norm().item())) == ["", ""]


@pytest.mark.filterwarnings("ignore:the forward of Normed returns no loss")
def test_a_loss_of_so_many_rows_is_refused_with_its_line() -> None:
    logits = normed(dp=1, micro_batches=2)(X)
    loss = torch.stack([logits[k].square().sum() for k in range(len(X))]).sum()
    with pytest.raises(RecordError, match=r"test_pending\.py:\d+: the loss .* as out\[7\]"):
        loss.backward()


def on_two(**options: Any) -> str:
    try:
        normed(**options)
    except ConfigError as error:
        return str(error)
    raise AssertionError


def test_dp_ranks_have_a_loss_function() -> None:
    for told in run_ranks(2, lambda: on_two(dp=2)):
        assert "loss=fn" in told
    with pytest.warns(MerakWarning, match="the forward of Normed returns no loss"):
        normed()


@pytest.mark.filterwarnings("ignore:the forward of Normed returns no loss")
def test_a_number_of_samples_is_that_of_the_batch() -> None:
    model = normed(micro_batches=4)
    logits = model(X)
    (logits.sum() / len(logits)).backward()
    assert model.full_gradients()["last.bias"].tolist() == [1.0] * 3


def of_parts() -> tuple[float, float, Tensors, str]:
    """With a number of Python's, a tensor of the loss's own, and a read before backward; and what
    ranks are told that read their parts.
    """
    batch = words(0)
    model = merakc.auto_parallel(
        build(Words), batch, dp=2, state_shards="zero-1", cluster=NOMINAL_CPU
    )
    logits = model(ids=batch["ids"])["logits"]
    with pytest.raises(ConfigError) as told:
        summed(logits, batch).backward()
    model.read_whole_batches()
    logits = model(ids=batch["ids"])["logits"]
    right = (logits.argmax(-1) == batch["labels"]).double().mean().item()
    loss = summed(logits, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    return loss.item(), right, model.full_gradients(), str(told.value)


def summed(logits: torch.Tensor, batch: Tensors) -> torch.Tensor:
    """A sum over the labels, divided by the number of samples, and a mean over some of them."""
    lost = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return lost / len(batch["ids"]) + logits.chunk(2)[0].square().mean()


def test_dp_ranks_read_whole_batches_and_train_as_one_process_or_are_refused() -> None:
    model, batch = build(Words), words(0)
    logits = model(batch["ids"])["logits"]
    right = (logits.argmax(-1) == batch["labels"]).double().mean().item()
    loss = summed(logits, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    found = run_ranks(2, of_parts)
    assert [f[:2] for f in found] == [pytest.approx((loss.item(), right), rel=1e-12)] * 2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[0][2][name], parameter.grad, rtol=1e-10, atol=1e-12)
    for *_, told in found:
        assert "numbers of Python in it are those of one data-parallel rank's samples" in told
        assert "read_whole_batches()" in told


class Regularised(nn.Module):
    """Returns its loss, with dropout, beside what it is made of; `more` is added inside."""

    def __init__(self, more: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.more = nn.Linear(4, 8), nn.Linear(8, 3), more

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, logits and features."""
        z = F.dropout(torch.tanh(self.first(x)), 0.5, self.training)
        logits = self.last(z)
        loss = F.cross_entropy(logits, labels)
        loss = loss / 2 + self.more * added(logits, z) if self.more else loss
        return {"loss": loss, "logits": logits, "z": z}


def added(logits: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    spread = F.kl_div(logits.log_softmax(-1), torch.full_like(logits, 1 / 3), reduction="batchmean")
    return spread + z.square().mean()


def with_terms(options: dict[str, Any], more: float) -> tuple[list[float], Tensors]:
    """Trained on a loss with terms that are added inside the model, or (`more` 0) in the loop."""
    whole = options.get("dp", 1) > 1
    batch = {"x": X, "labels": Y}
    model = merakc.auto_parallel(
        build(lambda: Regularised(more)), batch, cluster=NOMINAL_CPU, whole_batches=whole, **options
    )
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        out = model(**batch)
        loss = out["loss"]
        loss = loss if more else loss / 2 + 0.3 * added(out["logits"], out["z"])
        (loss * 1).backward()  # as accelerate does, which divides it
        losses.append(loss.detach().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.full_state_dict()


@pytest.mark.filterwarnings("ignore:a loss is made of outputs of a call of which a step is taken")
@pytest.mark.parametrize("options", [{"dp": 1, "micro_batches": 2}, {"tp": 2}, {"dp": 2}], ids=str)
def test_terms_may_be_added_to_the_models_own_loss(options: dict[str, Any]) -> None:
    wanted, state = with_terms({"dp": 1, "micro_batches": 1}, 0.3)
    ranks = 1 if "micro_batches" in options else 2
    found = run_ranks(ranks, lambda: with_terms(options, 0.0))
    assert all(losses == pytest.approx(wanted, rel=1e-12) for losses, _ in found)
    assert_close(found[0][1], state)


class Noting(Regularised):
    """Notes something in Python, as BERT does: no forward by itself is like that of a step."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """As the others'."""
        self.kind = "classes"
        return super().forward(x, labels)


@pytest.mark.filterwarnings("ignore:a loss is made of outputs of a call of which a step is taken")
def test_a_further_loss_is_known_behind_its_step() -> None:
    batch = {"x": X, "labels": Y}
    model = merakc.auto_parallel(build(Noting), batch, cluster=NOMINAL_CPU)
    loss = F.cross_entropy(
        model(**batch)["logits"], Y, weight=torch.tensor([0.2, 0.3, 0.5]).double()
    )
    scaled = loss / 2  # as accelerate does
    scaled.backward()
    assert loss.detach().item() == pytest.approx(2 * scaled.item(), rel=1e-12)


def test_that_a_second_step_is_taken_is_told() -> None:
    with pytest.warns(MerakWarning, match="one more is taken"):
        with_terms({"dp": 1}, 0.0)

"""Training with `loss=fn` on real ranks, and reading outputs of training steps, as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import Tensors, assert_close, build, parallel, part, warm_up, words
from tests.train.outside.small import Bare, cross_entropy

STEPS = 2
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"dp": 2, "micro_batches": 2, "state_shards": "zero-1"}),
    (2, {"dp": 1, "pp": 2, "micro_batches": 2}),
]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def trained(options: dict[str, Any]) -> tuple[list[Any], Tensors, list[torch.Tensor]]:
    model = parallel(Bare, words(0), loss=cross_entropy, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, outputs = model(**part(words(step), model))
        if step == 0:
            assert outputs["logits"].argmax(-1).shape == outputs["logits"].shape[:-1]
        loss.backward()
        optimizer.step()
        steps.append((loss.item(), outputs["logits"].detach().clone()))
    with pytest.raises(ConfigError, match=r"modes were changed|numbers of Python"):
        outputs["logits"].sum().backward()
    predicted = model.predict(**part(words(9), model))  # the model's own, the labels left alone
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # of which all is read at the end
        evaluated = [model(**part(words(k), model))[1]["x"] for k in (7, 8)]
    model.train()
    late = [x.double() for x in evaluated]
    return steps, model.full_state_dict(), [predicted["logits"], *late]


@pytest.mark.parametrize(("count", "options"), LAYOUTS)
def test_a_loss_function_trains_as_one_process(count: int, options: dict[str, Any]) -> None:
    plain = build(Bare)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    wanted = []
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = plain(words(step)["ids"])
        loss = cross_entropy(outputs, words(step))
        loss.backward()
        optimizer.step()
        wanted.append((loss.item(), outputs["logits"].detach()))
    last = [plain(words(9)["ids"])["logits"].detach()]
    with torch.autocast("cpu", torch.bfloat16):
        last += [plain(words(k)["ids"])["x"].detach().double() for k in (7, 8)]
    ranks = run_ranks(count, trained, options)
    assert_close(ranks[0][1], plain.state_dict())
    dp = options.get("dp", 1)
    for rank, (steps, _, predicted) in enumerate(ranks):
        for (loss, logits), (plain_loss, plain_logits) in zip(steps, wanted, strict=True):
            assert loss == pytest.approx(plain_loss, rel=1e-12)
            torch.testing.assert_close(logits, plain_logits.chunk(dp)[rank % dp])
        for ours, theirs in zip(predicted, last, strict=True):
            torch.testing.assert_close(ours, theirs.chunk(dp)[rank % dp])


def read_late(options: dict[str, Any]) -> tuple[list[tuple[float, float]], Tensors]:
    """What is read of each step behind the optimizer's."""
    example = {"ids": words(0)["ids"]}
    model = merakc.auto_parallel(
        build(Bare), example, whole_batches=True, cluster=NOMINAL_CPU, **options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return steps_read_late(model, optimizer), model.full_state_dict()


def steps_read_late(model: Any, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    found = []
    for step in range(STEPS):
        outputs = model(words(step)["ids"])
        cross_entropy(outputs, words(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        logits = outputs["logits"]
        right = (logits.argmax(-1) == words(step)["labels"]).sum().item()
        found.append((logits[0, 0, 0].item(), logits.std().item() + right))
    return found


@pytest.mark.filterwarnings("ignore:the forward of .* returns no loss")
@pytest.mark.parametrize(("count", "options"), LAYOUTS)
def test_small_outputs_are_read_behind_the_optimizers_step(
    count: int, options: dict[str, Any]
) -> None:
    plain = build(Bare)
    wanted = steps_read_late(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    ranks = run_ranks(count, read_late, options)
    assert_close(ranks[0][1], plain.state_dict())
    for found, _ in ranks:
        assert [x for both in found for x in both] == pytest.approx(
            [x for both in wanted for x in both], rel=1e-10
        )


def test_outputs_that_a_step_has_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merakc.train.outputs.LITTLE_BYTES", 0)  # of none that nobody asks for
    model = parallel(Bare, words(0), loss=cross_entropy)
    loss, outputs = model(**words(0))
    loss.backward()
    with pytest.raises(ConfigError, match=r"call model.keep_outputs\('x'\)"):
        outputs["x"].sum().item()
    model.keep_outputs("x")
    loss, outputs = model(**words(0))
    loss.backward()
    assert outputs["x"].sum().item() == pytest.approx(
        build(Bare)(words(0)["ids"])["x"].sum().item()
    )
    model.eval()
    loss, outputs = model(**words(0))
    with pytest.raises(ConfigError, match="in evaluation mode gives, of which no step was taken"):
        loss.backward()
    assert not outputs["logits"].requires_grad
    assert outputs["logits"].shape == (8, 6, 16)
    loss, outputs = model(**words(1))
    model.get_parameter("norm.weight").data.neg_()  # which no version tells, nor a sum
    with pytest.raises(ConfigError, match=r"'logits' is read, .* with other weights"):
        outputs["logits"].sum()


class Scaled(torch.nn.Module):
    """A loss with a mode, a number and a number of its class."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.own = 1.0

    def forward(self, outputs: Tensors, batch: Tensors) -> torch.Tensor:
        """The loss, ten times in evaluation mode."""
        scale = self.own * self.shared * (1.0 if self.training else 10.0)
        return scale * cross_entropy(outputs, batch)


def test_what_a_loss_function_holds_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Scaled()
    model = parallel(Bare, words(0), loss=loss)
    first = model(**words(0)).loss.item()
    loss.own = 2.0
    assert model(**words(0)).loss.item() == pytest.approx(2 * first)
    monkeypatch.setattr(Scaled, "shared", 3.0)
    assert model(**words(0)).loss.item() == pytest.approx(6 * first)
    loss.eval()
    assert model(**words(0)).loss.item() == pytest.approx(60 * first)

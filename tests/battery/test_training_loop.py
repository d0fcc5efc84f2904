"""A training loop that was not changed trains as it does in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.ranks import run_ranks
from merakc.train.model import ParallelModel
from tests.battery.small_models import (
    Tensors,
    Words,
    assert_close,
    build,
    gradients,
    parallel,
    part,
    words,
)

LAYOUTS: dict[str, dict[str, int]] = {"dp": {"dp": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}}
STEPS = 3


class Factored(torch.optim.Optimizer):
    """Adafactor's elementwise part: a second moment, updates clipped by their own size."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                decay = 1 - state["step"] ** -0.8
                square = state.setdefault("square", torch.zeros_like(p))
                square.mul_(decay).add_(p.grad.square() + 1e-3, alpha=1 - decay)
                p.sub_(group["lr"] * p.grad / square.sqrt())


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "factored": lambda p: Factored(p, lr=0.01),
}


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, give: Callable[[Tensors], Tensors]
) -> list[float]:
    """A loop as users write it, with a scheduler, accumulation and a scaled loss."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    losses = []
    for step in range(STEPS):
        out = model(**give(words(step)))
        (out["loss"] / 2).backward()
        (model(**give(words(10 + step)))["loss"] / 2).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(out["loss"].item())
    return losses


def made() -> nn.Module:
    return Words(blocks=2)


Trained = list[tuple[list[float], Tensors]]
Clipped = list[tuple[float, Tensors]]


def train_all(model: ParallelModel) -> Trained:
    found = []
    start = copy.deepcopy(model.state_dict())
    for optimizer in OPTIMIZERS.values():
        model.load_state_dict(start)
        model.zero_grad()
        losses = loop(model, optimizer(model.parameters()), lambda batch: part(batch, model))
        found.append((losses, model.full_state_dict()))
    return found


def check_trained(ranks: list[Trained]) -> None:
    for k, optimizer in enumerate(OPTIMIZERS.values()):
        plain = build(made)
        losses = loop(plain, optimizer(plain.parameters()), lambda batch: batch)
        for rank in ranks:
            assert rank[k][0] == pytest.approx(losses, rel=1e-11)
        assert_close(ranks[0][k][1], plain.state_dict())


NORMS = (2.0, math.inf, 1.0)


def clip_all(model: ParallelModel) -> Clipped:
    found = []
    for norm_type in NORMS:
        model.zero_grad()
        model(**part(words(0), model))["loss"].backward()
        norm = model.clip_grad_norm_(0.01, norm_type)
        found.append((norm.item(), model.full_gradients()))
    return found


def check_clipped(ranks: list[Clipped]) -> None:
    plain = build(made)
    for k, norm_type in enumerate(NORMS):
        plain.zero_grad()
        plain(**words(0))["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
        for rank in ranks:
            assert rank[k][0] == pytest.approx(norm.item(), rel=1e-12)
        assert_close(ranks[0][k][1], gradients(plain))


def evaluate(model: ParallelModel) -> dict[str, Any]:
    give = part(words(0), model)
    found: dict[str, Any] = {}
    model.eval()
    found["eval"] = model(**give)["loss"]
    with torch.no_grad():
        found["no_grad"] = model(**give)["loss"]
    predicted = model.predict(**give)
    found["kind"], found["loss"] = type(predicted), predicted["loss"]
    found["logits"] = predicted["logits"], model(ids=give["ids"])["logits"]
    model.train()
    model(**give)["loss"].backward()
    for batch in (words(1, 16), words(2, 8, 4)):
        found[str(tuple(batch["ids"].shape))] = model(**part(batch, model))["loss"].item()
    assert len(model._own("_steps").compiled) == 7  # evaluations with gradients on and off are two
    return {**found, "gradients": model.full_gradients(), "dp": model.data_parallel_rank}


def check_evaluated(ranks: list[dict[str, Any]], dp: int) -> None:
    plain = build(made)
    out = plain(**words(0))
    out["loss"].backward()
    for rank in ranks:
        assert rank["kind"] is dict
        for name in ("eval", "no_grad", "loss"):
            assert rank[name].item() == pytest.approx(out["loss"].item(), rel=1e-12)
            assert rank[name].requires_grad == (name == "eval")  # as in one process
        wanted = out["logits"].detach().chunk(dp)[rank["dp"]]
        for logits in rank["logits"]:
            torch.testing.assert_close(logits, wanted, rtol=1e-11, atol=1e-12)
        for batch in (words(1, 16), words(2, 8, 4)):
            loss = plain(**batch)["loss"].item()
            assert rank[str(tuple(batch["ids"].shape))] == pytest.approx(loss, rel=1e-12)
    assert_close(ranks[0]["gradients"], gradients(plain))


def in_turn(layout: dict[str, int]) -> tuple[dict[str, Any], Clipped, Trained]:
    """All of it on one model, whose weights the training changes last."""
    model = parallel(made, words(0), micro_batches=2, **layout)
    return evaluate(model), clip_all(model), train_all(model)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_unchanged_loops_clipping_evaluation_and_other_shapes(layout: dict[str, int]) -> None:
    evaluated, clipped, trained = zip(*run_ranks(2, in_turn, layout), strict=True)
    check_evaluated([*evaluated], layout.get("dp", 1))
    check_clipped([*clipped])
    check_trained([*trained])


def own_shapes() -> tuple[float, Tensors]:
    """Each dp rank pads its batch to its own length, from the example on."""
    import torch.distributed as dist

    import merakc

    batch = words(0, 4, 4 + dist.get_rank())
    model = merakc.auto_parallel(build(Words), batch, dp=2)
    loss = model(**batch)["loss"]
    loss.backward()
    return loss.item(), model.full_gradients()


def test_ranks_with_batches_of_different_lengths() -> None:
    ranks = run_ranks(2, own_shapes)
    plain = build(Words)
    batches = [words(0, 4, 4 + rank) for rank in range(2)]
    counts = [int((b["labels"] >= 0).sum()) for b in batches]
    loss = sum(plain(**b)["loss"] * n / sum(counts) for b, n in zip(batches, counts, strict=True))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert [r[0] for r in ranks] == pytest.approx([loss.item()] * 2, rel=1e-12)
    assert_close(ranks[0][1], gradients(plain))

"""Updates on the host in the backward train to the same bits as those in the optimizer's step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.train.model import ParallelModel
from tests.battery.small_models import Tensors, Words, parallel, part, warm_up, words
from tests.small_buckets import small_buckets

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"micro_batches": 2},
    "some of it": {"micro_batches": 2, "offload": "optimizer, 6 kB"},
    "zero-3": {"dp": 2, "state_shards": "zero-3", "micro_batches": 2},
    "tp, bf16": {"dp": 1, "tp": 2, "precision": "bf16-mixed", "micro_batches": 2},
    "tied, pp": {"dp": 1, "pp": 2, "micro_batches": 2},
    "dp, pp, zb": {"dp": 2, "pp": 2, "micro_batches": 2, "schedule": "zb-h1"},
    "fetched": {"micro_batches": 2, "offload": "parameters"},
    "fetched, bf16": {"micro_batches": 2, "offload": "parameters", "precision": "bf16-mixed"},
}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def _adamw(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    named = [*model.named_parameters()]
    decay = {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1}
    return torch.optim.AdamW([decay, {"params": [p for n, p in named if p.dim() <= 1]}], **more)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def _loop(model: ParallelModel, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    """Steps under a schedule; gradients are set to none behind the model's call."""
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))
    losses = []
    for number in numbers:
        loss = model(**part(words(number), model))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(float(loss.detach()))
    return losses


def trained(
    layout: dict[str, Any], make: Callable[..., torch.optim.Optimizer], under: bool, folder: Path
) -> tuple[list[float], Tensors, float]:
    """Losses and weights of some steps, the last behind a load; and the share of a rank's
    parameters that a step has updated in the backward.
    """
    model = parallel(lambda: Words(blocks=2), words(0), **{"offload": "optimizer", **layout})
    optimizer, counted = make(model), [0]
    if under:
        merakc.step_in_backward(model, optimizer)
        updates = model._own("_steps").sharded.updates
        plain = updates.ended

        def counts(gradients: Tensors) -> Any:
            counted[0] += len(updates.updated)
            return plain(gradients)

        updates.ended = counts
    losses = _loop(model, optimizer, range(3))
    merakc.save(folder, model, optimizer)
    losses += _loop(model, optimizer, range(3, 5))
    merakc.load(folder, model, optimizer)
    losses += _loop(model, optimizer, range(3, 4))
    held, buckets = (len(getattr(model._own("_steps").sharded, n)) for n in ("owned", "buckets"))
    assert buckets > 1
    return losses, model.full_state_dict(), counted[0] / 6 / held


def both(layout: dict[str, Any], make: Callable[..., torch.optim.Optimizer], folder: Path) -> None:
    with small_buckets(1_500):  # of which the first are updated while others are still to come
        plain_losses, weights, _ = trained(layout, make, False, folder / "plain")
        losses, ours, updated = trained(layout, make, True, folder / "under")
    assert losses == plain_losses
    assert updated == 1.0 or (layout.get("offload") == "optimizer, 6 kB" and updated > 0.1)
    assert ours.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bits_are_those_of_the_optimizers_step(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    ranks = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
    run_ranks(ranks, both, layout, _sgd if name == "fetched" else _adamw, tmp_path)


def _ready(**layout: Any) -> tuple[ParallelModel, torch.optim.Optimizer]:
    given = {"micro_batches": 2, "offload": "optimizer", **layout}
    model = parallel(lambda: Words(blocks=2), words(0), **given)
    return model, _adamw(model)


def _clips(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _clips_by_ours(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    model.clip_grad_norm_(1.0)


def _changes_rate(_: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] /= 2


def _empties(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    model.zero_grad()


def _calls_again(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    model(**words(1))["loss"].backward()


def _looks(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    float(next(p.grad for p in model.parameters()).sum())  # type: ignore[union-attr]


def _writes(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        next(iter(model.parameters())).mul_(0.9)


def _writes_data(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    next(iter(model.parameters())).data.clamp_(-1, 1)


def _reads(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    float(next(iter(model.parameters())).norm())


def _evaluates(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(**words(0))


def _keeps_settings(_: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def _loads(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    model.load_state_dict(model.state_dict())


def _copies(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    copy.deepcopy(model)


def _gathers(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    model.full_state_dict()


def _saves(model: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    with TemporaryDirectory() as folder:
        merakc.save(folder, model, optimizer)


def _exports(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    with TemporaryDirectory() as folder:
        merakc.export(folder, model)


def _edits_state(_: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    next(iter(optimizer.state.values()))["exp_avg"].mul_(0.5)


def _saves_state(_: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state_dict()


def _swaps(_: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    first, second = optimizer.param_groups[0]["params"][:2]
    optimizer.param_groups[0]["params"][:2] = [second, first]


def _gives_closure(_: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step(lambda: 0.0)


def _steps_under_autocast(_: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    with torch.autocast("cpu"):
        optimizer.step()


def _zeroes(_: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def _hooks_a_rate(_: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=0.5))


def _hooks_gradients(model: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    def halves(*_: object) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halves)


REFUSED = {
    _clips: "a gradient is read",
    _clips_by_ours: "a gradient is read",
    _changes_rate: "change learning rates",
    _empties: "taken away",
    _calls_again: "waits for optimizer.step",
    _looks: "a gradient is read",
    _writes: "a parameter is read or written",
    _writes_data: "a parameter is read or written",
    _reads: "a parameter is read or written",
    _evaluates: "waits for optimizer.step",
    _keeps_settings: "change learning rates",
    _loads: "waits for optimizer.step",
    _copies: "waits for optimizer.step",
    _gathers: "waits for optimizer.step",
    _saves: "optimizer.step",
    _exports: "optimizer.step",
    _zeroes: "taken away",
    _edits_state: "the optimizer's state is read or written",
    _saves_state: "the optimizer's state is read or written",
    _swaps: "change learning rates",
    _gives_closure: "a closure or other arguments",
    _steps_under_autocast: "under autocast",
    _hooks_a_rate: "change learning rates",
    _hooks_gradients: "a gradient is read",
}


Way = Callable[[ParallelModel, torch.optim.Optimizer], None]


def holds_views() -> None:
    model, optimizer = _ready()
    held = next(iter(model.parameters())).detach()
    merakc.step_in_backward(model, optimizer)
    model(**words(0))["loss"].backward()
    held.mul_(0.9)
    with pytest.raises(merakc.MerakError, match="shares its memory"):
        optimizer.step()


def one_step(way: Way, before: Way = lambda *_: None) -> None:
    model, optimizer = _ready()
    merakc.step_in_backward(model, optimizer)
    loss = model(**words(0))["loss"]
    before(model, optimizer)
    loss.backward()
    way(model, optimizer)
    optimizer.step()


def _penalises(model: ParallelModel, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)


def stops_in_step() -> None:
    model, optimizer = _ready()
    merakc.step_in_backward(model, optimizer)
    model(**words(0))["loss"].backward()
    handle = optimizer.register_step_post_hook(lambda *_: 1 / 0)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    with pytest.raises(merakc.MerakError, match="to run to its end"):
        model(**words(1))
    optimizer.step()
    optimizer.zero_grad()
    model(**words(1))["loss"].backward()
    optimizer.step()


def no_zero_grad() -> None:
    model, optimizer = _ready()
    merakc.step_in_backward(model, optimizer)
    for number in range(2):
        model(**words(number))["loss"].backward()
        optimizer.step()


def sets_to_zero() -> None:
    model, optimizer = _ready()
    merakc.step_in_backward(model, optimizer)
    for number in range(3):
        model(**words(number))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def refuses() -> None:
    for way, told in REFUSED.items():
        with pytest.raises(merakc.MerakError, match=told):
            one_step(way)
    with pytest.raises(merakc.MerakError, match="has a gradient before backward"):
        one_step(lambda *_: None, _penalises)
    with pytest.raises(merakc.MerakError, match="has a gradient before backward"):
        no_zero_grad()
    sets_to_zero()
    stops_in_step()
    holds_views()
    model, optimizer = _ready()
    merakc.step_in_backward(model, optimizer)
    with pytest.raises(merakc.MerakError, match=r"the gradient of the loss is 0\.5"):
        (model(**words(0))["loss"] / 2).backward()
    with pytest.raises(merakc.MerakError, match=r"waits for loss.backward\(\)"):
        model(**words(0))
    with pytest.raises(merakc.MerakError, match=r"waits for loss.backward\(\)"):
        optimizer.step()


def test_what_comes_too_late_is_refused() -> None:
    run_ranks(1, refuses)


class CountsInTensor(torch.optim.SGD):
    """One whose steps get shorter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taken = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.taken += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / self.taken, alpha=group["lr"])


class DecaysAll(torch.optim.SGD):
    """One that touches parameters without a gradient, too."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)


def not_taken() -> None:
    model, optimizer = _ready(on_nonfinite="skip")
    with pytest.raises(merakc.MerakError, match="left out"):
        merakc.step_in_backward(model, optimizer)
    model, _ = _ready()
    with pytest.raises(merakc.MerakError, match="LBFGS"):
        merakc.step_in_backward(model, torch.optim.LBFGS(model.parameters()))
    for kind in (CountsInTensor, DecaysAll):
        with pytest.raises(merakc.MerakError, match=kind.__name__):
            merakc.step_in_backward(model, kind(model.parameters(), lr=0.1))
    model, optimizer = _ready(offload="none")
    before = copy.deepcopy(model.full_state_dict())
    merakc.step_in_backward(model, optimizer)
    model(**words(0))["loss"].backward()
    assert model.clip_grad_norm_(1.0) > 0
    optimizer.step()
    assert any(not torch.equal(before[n], v) for n, v in model.full_state_dict().items())


def test_what_cannot_step_there_is_refused() -> None:
    run_ranks(1, not_taken)


def infinite(folder: Path) -> None:
    model, optimizer = _ready()
    merakc.step_in_backward(model, optimizer)
    merakc.save(folder, model, optimizer)
    with torch.no_grad():
        next(iter(model.parameters())).fill_(torch.inf)
    with pytest.raises(merakc.MerakError, match="not finite"):
        model(**words(0))
    with pytest.raises(merakc.MerakError, match="the last step broke off"):
        model.full_state_dict()
    with pytest.raises(merakc.MerakError, match="the last step broke off"):
        model(**words(0))
    merakc.load(folder, model, optimizer)
    model(**words(0))["loss"].backward()
    optimizer.step()


def test_gradients_that_are_not_finite_update_nothing(tmp_path: Path) -> None:
    run_ranks(1, infinite, tmp_path)


def hooked(under: bool) -> Tensors:
    model, optimizer = _ready()
    hooked = next(p for p in model.parameters() if p.dim() > 1)
    hooked.register_hook(lambda gradient: gradient * 0.5)
    if under:
        merakc.step_in_backward(model, optimizer)
    with pytest.raises(Exception, match="index out of range"):
        model(**{**words(0), "ids": words(0)["ids"] + 10_000})
    _loop(model, optimizer, range(3))
    return model.full_state_dict()


class Switched(Words):
    """With a parameter that is used in some steps alone."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.more, self.on = nn.Parameter(torch.ones(1, dtype=torch.float64)), True

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        found = super().forward(ids, labels)
        return {**found, "loss": found["loss"] * self.more.sum()} if self.on else found


def switched(under: bool) -> Tensors:
    model = parallel(Switched, words(0), micro_batches=2, offload="optimizer")
    optimizer = _sgd(model)
    if under:
        merakc.step_in_backward(model, optimizer)
    for number in range(4):
        model.on = number % 2 == 0
        _loop(model, optimizer, range(number, number + 1))
    return model.full_state_dict()


def test_what_a_step_does_not_use_is_not_updated() -> None:
    (plain,), (ours,) = run_ranks(1, switched, False), run_ranks(1, switched, True)
    assert all(torch.equal(ours[name], value) for name, value in plain.items())


def test_what_users_have_hooks_on_waits_for_the_step_and_a_bad_batch_is_none() -> None:
    (plain,), (ours,) = run_ranks(1, hooked, False), run_ranks(1, hooked, True)
    assert all(torch.equal(ours[name], value) for name, value in plain.items())

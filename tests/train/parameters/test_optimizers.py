"""What an optimizer may update is tried: those of whole matrices, or of all, get no parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from merakc.errors import ConfigError
from merakc.ir.layout import whole_layout
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.part import Place, places
from merakc.train.parameters import optimizers
from tests.train.parameters.test_norms import Tied, batch

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class ByNorm(torch.optim.Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        (group,) = self.param_groups
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
        for p in group["params"]:
            p.add_(p.grad / norm, alpha=-group["lr"])


class ByRow(ByNorm):
    """Divides by the largest of a row, of large matrices alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for p in self.param_groups[0]["params"]:
            large = p.numel() > 4096
            p.sub_(p.grad / (p.grad.abs().amax(-1, keepdim=True) if large else 1.0))


class Wrapping(torch.optim.Optimizer):
    """Another one takes its steps, as of published wrappers."""

    def __init__(self, parameters: list[nn.Parameter], kind: Make) -> None:
        self.base = kind(parameters)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        del closure
        self.base.step()


class Failing(ByNorm):
    """Fails on small parameters."""

    def step(self, closure: Any = None) -> None:
        raise ValueError("too small")


O = torch.optim  # noqa: E741
# By name: how it is made, and whether parts of parameters, and whole ones alone, may be updated.
CASES: dict[str, tuple[Make, bool, bool]] = {
    "AdamW": (lambda p: O.AdamW(p, amsgrad=True), True, True),
    "fused": (lambda p: O.AdamW(p, fused=True), True, True),
    "foreach": (lambda p: O.Adam(p, foreach=True), True, True),
    "tensor lr": (lambda p: O.AdamW(p, lr=torch.tensor(0.1)), True, True),
    "SGD": (lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True), True, True),
    "Rprop": (O.Rprop, True, True),
    "RAdam": (O.RAdam, True, True),
    "Adadelta": (O.Adadelta, True, True),
    "two groups": (
        lambda p: O.AdamW([{"params": p[:1]}, {"params": p[1:], "lr": 1.0}]), True, True),
    "Adafactor": (O.Adafactor, False, True),
    "Muon": (O.Muon, False, True),
    "LBFGS": (O.LBFGS, False, False),
    "by norm": (ByNorm, False, False),
    "by row": (ByRow, False, True),
    "wrapped AdamW": (lambda p: Wrapping(p, O.AdamW), True, True),
    "wrapped Muon": (lambda p: Wrapping(p, O.Muon), False, True),
    "failing": (Failing, False, False),
}  # fmt: skip


@pytest.fixture
def parameters() -> Iterator[list[nn.Parameter]]:
    found = [nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    for p in found:
        p.grad = torch.randn_like(p)
    yield found
    for p in found:
        del optimizers._held[p]


def may(make: Make, parameters: list[nn.Parameter]) -> bool:
    """Whether it passes; it changes nothing."""
    optimizer = make(parameters)
    before = [p.detach().clone() for p in parameters]
    random = torch.get_rng_state()
    try:
        optimizers.check(optimizer)
    except ConfigError as error:
        assert type(optimizer).__name__ in str(error)  # noqa: PT017
        assert "'0'" in str(error) or "some of the parameters" in str(error)  # noqa: PT017
        found = False
    else:
        found = True
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert not optimizer.state
    assert torch.equal(random, torch.get_rng_state())
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_may_be_updated(name: str, parameters: list[nn.Parameter]) -> None:
    make, parts, some = CASES[name]
    named = {str(k): p for k, p in enumerate(parameters)}
    optimizers.hold(named, are_some=False)
    assert may(make, parameters) or name == "failing"
    optimizers.hold(named, are_some=True)
    assert may(make, parameters) is some
    for key, p in named.items():
        places[p] = Place(key, whole_layout((8, 6)), 1, 0, 0, 24)
    optimizers.hold(named, are_some=False)
    assert may(make, parameters) is parts


def test_a_user_answers_for_a_class(parameters: list[nn.Parameter]) -> None:
    class Own(Failing):
        pass

    optimizers.hold({"0": parameters[0]}, are_some=True)
    assert not may(Own, parameters[:1])
    merakc.declare_elementwise(Own)
    assert may(Own, parameters[:1])
    optimizers.hold({str(k): p for k, p in enumerate(parameters)}, are_some=True)


def test_an_optimizer_that_was_made_too_early() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    parallel = merakc.auto_parallel(model, batch(0, 1), cluster=NOMINAL_CPU)
    parallel(batch(0, 1))["loss"].backward()
    with pytest.raises(ConfigError, match=r"holds 'a\.weight' as it was before auto_parallel"):
        optimizer.step()

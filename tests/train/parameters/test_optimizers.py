"""What an optimizer may update is tried: those of whole matrices, or of all, get no parts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_optimizer import SOAP
from torch import nn

import merakc
from merakc.equality.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.ir.layout import parse_layout
from merakc.ir.program import Mesh
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.groups import Groups
from merakc.runtime.part import Place, places
from merakc.train.parameters import optimizers
from merakc.train.parameters.matrices import Home, WholeTensors
from merakc.train.parameters.together import Together
from tests.train.parameters.test_idioms import built, loss_of
from tests.train.parameters.test_norms import Tied, batch

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"offload": "optimizer"},
    "dp 2": {"dp": 2, "state_shards": "zero-1"},
}
PIPELINE = Home(Groups(Mesh(1, 2, 2), 0), None)
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


class Without(ByNorm):
    """Changes nothing, as a trial sees it."""

    def step(self, closure: Any = None) -> None:
        pass


class Listing(ByRow):
    """Keeps a list of its own of what it updates."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.own = list(parameters)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for p in self.own:
            if p.grad is not None:
                p.sub_(p.grad / (p.grad.abs().amax() + 1.0))


O = torch.optim  # noqa: E741
# By name: how it is made, and what of: "parts" of parameters, "whole" ones by
# themselves, or all "together".
CASES: dict[str, tuple[Make, str]] = {
    "AdamW": (lambda p: O.AdamW(p, amsgrad=True), "parts"),
    "fused": (lambda p: O.AdamW(p, fused=True), "parts"),
    "foreach": (lambda p: O.Adam(p, foreach=True), "parts"),
    "tensor lr": (lambda p: O.AdamW(p, lr=torch.tensor(0.1)), "parts"),
    "SGD": (lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "parts"),
    "Rprop": (O.Rprop, "parts"),
    "RAdam": (O.RAdam, "parts"),
    "Adadelta": (O.Adadelta, "parts"),
    "two groups": (lambda p: O.AdamW([{"params": p[:1]}, {"params": p[1:], "lr": 1.0}]), "parts"),
    "Adafactor": (O.Adafactor, "whole"),
    "Muon": (O.Muon, "whole"),
    "SOAP": (SOAP, "whole"),  # rounding decides its bases, so that steps cannot be compared
    "no rate yet": (lambda p: O.Muon(p, lr=0.0), "whole"),
    "hardly any": (lambda p: O.Muon(p, lr=torch.tensor(1e-12)), "whole"),
    "without effect": (lambda p: Without(p), "none"),
    "LBFGS": (O.LBFGS, "together"),
    "by norm": (ByNorm, "together"),
    "by row": (ByRow, "whole"),
    "listing": (Listing, "none"),
    "wrapped AdamW": (lambda p: Wrapping(p, O.AdamW), "parts"),
    "wrapped Muon": (lambda p: Wrapping(p, O.Muon), "whole"),
    "failing": (Failing, "none"),
}  # fmt: skip


@pytest.fixture
def parameters() -> Iterator[list[nn.Parameter]]:
    found = [nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    for p in found:
        p.grad = torch.randn_like(p)
    yield found
    for p in found:
        del optimizers.holdings[p]


def updates(make: Make, parameters: list[nn.Parameter]) -> str:
    """What it may update; nothing is changed."""
    optimizer = make(parameters)
    before = [p.detach().clone() for p in parameters]
    random = torch.get_rng_state()
    try:
        optimizers.check(optimizer)
    except ConfigError as error:
        assert type(optimizer).__name__ in str(error)  # noqa: PT017
        assert "'0'" in str(error) or "some of the parameters" in str(error)  # noqa: PT017
        found = "none"
    else:
        brought = optimizers.bringing.get(optimizer)
        found = {WholeTensors: "whole", Together: "together"}.get(type(brought), "parts")
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert not optimizer.state
    assert torch.equal(random, torch.get_rng_state())
    return found


@pytest.mark.filterwarnings("ignore:.*updates all parameters together")
@pytest.mark.parametrize("name", CASES)
def test_what_may_be_updated(name: str, parameters: list[nn.Parameter]) -> None:
    make, wanted = CASES[name]
    named = {str(k): p for k, p in enumerate(parameters)}
    optimizers.hold(named, Home(Groups(Mesh(1, 1, 1), 0), None))
    assert updates(make, parameters) == "parts"
    optimizers.hold(named, PIPELINE)
    assert updates(make, parameters) == wanted
    for key, p in named.items():
        places[p] = Place(key, parse_layout("8* x 6"), 2, 0, 0, 24)
    optimizers.hold(named, PIPELINE)
    assert updates(make, parameters) == wanted


def test_a_user_answers_for_a_class(parameters: list[nn.Parameter]) -> None:
    class Own(Failing):
        pass

    optimizers.hold({str(k): p for k, p in enumerate(parameters)}, PIPELINE)
    assert updates(Own, parameters[:1]) == "none"
    merakc.declare_elementwise(Own)
    assert updates(Own, parameters[:1]) == "parts"


def test_an_optimizer_that_was_made_too_early() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    parallel = merakc.auto_parallel(model, batch(0, 1), cluster=NOMINAL_CPU)
    parallel(batch(0, 1))["loss"].backward()
    with pytest.raises(ConfigError, match=r"holds 'a\.weight' as it was before auto_parallel"):
        optimizer.step()


def _left_behind(layout: dict[str, Any]) -> int:
    """How many parameters are there yet when nobody has a model any more that was trained."""

    def trained() -> list[Any]:
        model = built(layout)
        kinds = [torch.optim.AdamW]
        if "offload" not in layout:
            kinds += [torch.optim.Adafactor, torch.optim.LBFGS]
        for optimizer in [kind(model.parameters()) for kind in kinds]:
            loss_of(model).backward()
            optimizer.step(partial(loss_of, model))
        return [weakref.ref(parameter) for parameter in model.parameters()]

    found = trained()
    gc.collect()
    return sum(parameter() is not None for parameter in found)


@pytest.mark.filterwarnings("ignore:.*updates all parameters together")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_model_that_nobody_has_is_let_go(layout: dict[str, Any]) -> None:
    ranks = 1 if "offload" in layout else 2
    assert run_ranks(ranks, _left_behind, layout, timeout_s=100.0) == [0] * ranks

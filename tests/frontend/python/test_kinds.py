"""A forward that goes by types of tensors and numbers is recorded as it runs in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Integral
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import merakc
from merakc.errors import ForwardError, RecordError
from merakc.frontend.python.kinds import Type, usual_types
from merakc.machines.cluster import NOMINAL_CPU

X = torch.arange(8.0).view(2, 4)
REAL, CLASS = type, "__class__"
WITH = nn.Parameter(torch.ones(4))
WITH.told = 3


class Asking(nn.Module):
    def __init__(self, ask: Callable[[Any, Tensor], bool]) -> None:
        super().__init__()
        self.ask, self.w = ask, nn.Parameter(torch.ones(4))
        self.w.told = 3
        self.register_buffer("b", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w * self.b).sum() * (3 if self.ask(self, x) else 2)


def matched(number: Any) -> bool:
    match number:
        case int():
            return True
    return False


ASKED: dict[str, Callable[[Any, Tensor], bool]] = {
    "batch": lambda m, x: type(x) is Tensor,
    "result": lambda m, x: type(x * 2) == Tensor,  # noqa: E721
    "parameter": lambda m, x: type(m.w) is nn.Parameter,
    "buffer": lambda m, x: type(m.b) is Tensor,
    "name": lambda m, x: type(x).__name__ == "Tensor",
    "table": lambda m, x: {Tensor: True, nn.Parameter: False}[type(x)],
    "size": lambda m, x: type(x.shape[0]) is int,
    "number": lambda m, x: type(x.max().item()) is float,
    "count": lambda m, x: type((x > 2).sum().item()) is int,
    "a number as a float": lambda m, x: isinstance((x * m.w).max().item(), float),
    "its own class": lambda m, x: (x * m.w).max().item().__class__ is float,
    "an abstract class": lambda m, x: isinstance((x * m.w > 2).sum().item(), Integral),
    "a pattern": lambda m, x: matched((x * m.w > 2).sum().item()),
    "module": lambda m, x: type(m).__name__ == "Asking" and type(type(m)) is type,
    "instances": lambda m, x: isinstance(Asking, type) and issubclass(type(Asking), type),
    "made": lambda m, x: type("Made", (), {"k": 1})().k == 1,
    "class": lambda m, x: type("Made", (type,), {})("Other", (), {}).__name__ == "Other",
    "of": lambda m, x: type[int].__args__ == (int,),
    "its class": lambda m, x: x.__class__ is Tensor and (x * 2).__class__.__name__ == "Tensor",
    "a parameter's class": lambda m, x: getattr(m.w, CLASS) is nn.Parameter,
    "what it holds": lambda m, x: not vars(x) and not (x * 2).__dict__,
    "what a parameter holds": lambda m, x: vars(m.w) == {"told": 3},
    "its names": lambda m, x: dir(x) == dir(X) and dir(x * 2) == dir(X),
    "a parameter's names": lambda m, x: dir(m.w) == dir(WITH),
}


@pytest.mark.parametrize("name", ASKED)
def test_types_are_those_of_one_process(name: str) -> None:
    plain = Asking(ASKED[name])
    model = merakc.auto_parallel(Asking(ASKED[name]), {"x": X}, cluster=NOMINAL_CPU)
    assert plain(X) == 3 * X.sum()
    assert model(x=X) == plain(X)


@pytest.mark.parametrize(
    "ask",
    [
        lambda m, x: f"{(x * m.w).max().item()}" == "7.0",
        lambda m, x: f"{(x * m.w).max().item():.0f}" == "7",
        lambda m, x: "7" in repr((x * m.w).max().item()),
        lambda m, x: {7.0: True}.get((x * m.w).max().item()),
    ],
)
def test_texts_of_numbers_are_refused(ask: Any) -> None:
    with pytest.raises(RecordError, match=r"test_kinds.py:\d+: a number .* is made a text"):
        merakc.auto_parallel(Asking(ask), (X,), dp=1, tp=1, pp=1, cluster=NOMINAL_CPU)


def test_nothing_stays() -> None:
    here = vars(sys.modules[__name__])
    with usual_types(Asking(ASKED["batch"])):
        assert here["type"] is type is Type
        assert "type" not in vars(torch)
        with usual_types(Asking(ASKED["batch"])):  # of a module inside
            assert FakeTensor.__dict__.keys() >= {"__class__", "__dict__"}
        assert FakeTensor.__dict__.keys() >= {"__class__", "__dict__"}
    assert "type" not in here
    assert type is REAL
    assert FakeTensor.__dict__.keys().isdisjoint({"__class__", "__dict__"})


def test_a_tensor_stays_what_it_is() -> None:
    class Own(Tensor):
        pass

    def to_own(m: Any, x: Tensor) -> bool:
        (x * 2).__class__ = Own
        return True

    def set_aside(m: Any, x: Tensor) -> bool:
        vars(x)["told"] = 1
        return True

    with pytest.raises(RecordError, match=r"makes a tensor one of .*Own"):
        merakc.auto_parallel(Asking(to_own), {"x": X}, cluster=NOMINAL_CPU)
    with pytest.raises(ForwardError, match="does not support item assignment"):
        merakc.auto_parallel(Asking(set_aside), {"x": X}, cluster=NOMINAL_CPU)


@pytest.mark.parametrize("of", ["w", "b", "x", "x * 2"])
def test_versions_and_memory_are_refused(of: str) -> None:
    def tensor(m: Any, x: Tensor) -> Tensor:
        found: Tensor = {"w": m.w, "b": m.b, "x": x, "x * 2": x * 2}[of]
        return found

    def ask(m: Any, x: Tensor) -> bool:
        return bool(tensor(m, x)._version > 0)

    def ask_of_memory(m: Any, x: Tensor) -> bool:
        return tensor(m, x).is_set_to(x)

    with pytest.raises(RecordError, match="whether two tensors have one memory is asked"):
        merakc.auto_parallel(Asking(ask_of_memory), {"x": X}, cluster=NOMINAL_CPU)
    with pytest.raises(
        RecordError, match=r"test_kinds\.py:\d+: the _version of a tensor.* is read"
    ):
        merakc.auto_parallel(Asking(ask), {"x": X}, cluster=NOMINAL_CPU)

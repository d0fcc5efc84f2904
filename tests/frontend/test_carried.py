"""Forwards that leave something behind: caches are recorded, what the next one would see is not."""

from __future__ import annotations

import contextvars
import functools
import io
import itertools
import os
import random
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from merakc.errors import RecordError
from merakc.frontend.record import record
from tests.frontend.against_eager import check, inputs_of, run_eager, run_graph
from tests.frontend.small import Small, linear, randn

Forward = Callable[[Any, Tensor], Any]
F64 = torch.float64


def model(forward: Forward, **attributes: Any) -> nn.Module:
    made = Small(forward, layer=linear())
    made.register_buffer("table", torch.arange(6.0, dtype=F64))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def cached(s: Any, x: Tensor) -> Any:
    if s.cache is None or s.cache.shape[0] < len(x):
        s.cache, s.length = torch.outer(torch.arange(len(x), dtype=F64), s.table).cos(), len(x)
    return (s.layer(x) * s.cache[: len(x)]).square().sum()


def flagged(s: Any, x: Tensor) -> Any:
    s.width, s.seen = x.shape[-1], {"shape": tuple(x.shape)}
    return s.layer(x).square().sum() * s.width


def observed(s: Any, x: Tensor) -> Any:
    y = s.layer(x)
    s.last, s.lasts = y, [y.detach(), x]
    return (s.last * s.lasts[0]).sum()


def made_late(s: Any, x: Tensor) -> Any:
    if not hasattr(s, "mask"):
        s.register_buffer("mask", torch.ones(6, 6, dtype=F64).tril(), persistent=False)
    return (s.layer(x) @ s.mask).square().sum()


@functools.lru_cache
def remembered(width: int) -> Tensor:
    return torch.arange(width, dtype=F64)


KEPT: dict[str, Callable[[], nn.Module]] = {
    "a cache": lambda: model(cached, cache=None, length=0),
    "a cache that is filled": lambda: model(cached, cache=torch.eye(6, dtype=F64), length=0),
    "sizes": lambda: model(flagged, width=0),
    "what is only looked at": lambda: model(observed),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_the_next_forward_does_not_see(name: str) -> None:
    made = KEPT[name]()
    before = dict(vars(made))
    check(made, randn(4, 6))
    assert vars(made) == before


def test_a_buffer_that_is_made_late() -> None:
    made, x = model(made_late), randn(4, 6)
    graph = record(made, (x,), {}).graph
    found = run_graph(graph, inputs_of(graph, made, (x,), {}))
    wanted = run_eager(made, (x,), {})
    assert torch.equal(found.outputs["output"], wanted.outputs["output"])


def counted(s: Any, x: Tensor) -> Any:
    s.calls += 1
    return s.layer(x).square().sum() / s.calls


def recurrent(s: Any, x: Tensor) -> Any:
    y = s.layer(x + s.memory)
    s.memory = y.detach()
    return y.square().sum()


def averaged(s: Any, x: Tensor) -> Any:
    s.memory = s.memory * 0.9
    return (s.layer(x) * s.memory).square().sum()


def initialised(s: Any, x: Tensor) -> Any:
    if not s.ready:
        s.ready = True
        return s.layer(x).sum()
    return s.layer(x).square().sum()


def weights_kept(s: Any, x: Tensor) -> Any:
    if s.memory is None:
        s.memory = s.layer.weight * 2
    return (x @ s.memory).square().sum()


def grown(s: Any, x: Tensor) -> Any:
    y = s.layer(x)
    s.things.append(y.mean().detach())
    return y.square().sum()


def cycled(s: Any, x: Tensor) -> Any:
    s.factors.append(s.factors.pop(0))
    return s.layer(x).square().sum() * s.factors[0]


def read(s: Any, x: Tensor) -> Any:
    loss = s.layer(x).square().sum()
    s.memory = 0.9 * s.memory + 0.1 * loss.item()
    return loss / s.memory


def asked(s: Any, x: Tensor) -> Any:
    rising = s.memory > 0
    s.memory = x.sum().item()
    return s.layer(x).square().sum() * (2 if rising else 1)


def given_back(s: Any, x: Tensor) -> Any:
    before, s.memory = s.memory, x.sum().item()
    return s.layer(x).square().sum(), before


ones = torch.ones(6, dtype=F64)
OTHERS_NUMBER = r"a number is used that another forward has read of its tensors and left behind"
CARRIED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a counter": (lambda: model(counted, calls=0), r"every forward changes 'calls' \(from 1 to 2"),
    "a memory": (lambda: model(recurrent, memory=ones), "in 'memory' a tensor that .* left there"),
    "an average": (lambda: model(averaged, memory=ones), "'memory'"),
    "a first time": (lambda: model(initialised, ready=False), "second forward .*'ready'"),
    "weights": (lambda: model(weights_kept, memory=None), "in 'memory' a tensor"),
    "a number in arithmetic": (lambda: model(read, memory=1.0), OTHERS_NUMBER),
    "a number that is asked about": (lambda: model(asked, memory=1.0), OTHERS_NUMBER),
    "a number that is returned": (lambda: model(given_back, memory=1.0), OTHERS_NUMBER),
    "a list": (lambda: model(grown, things=[]), r"every forward changes 'things\[1\]'"),
    "an order": (lambda: model(cycled, factors=[1.0, 2.0, 3.0]), r"'factors\[0\]'"),
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_the_next_forward_would_see_is_refused(name: str) -> None:
    make, message = CARRIED[name]
    inner = make()
    outer = Small(lambda s, x: s.inner(x), inner=inner)
    before = dict(vars(inner))
    with pytest.raises(RecordError, match=message.replace("'", "'inner.", 1)):
        record(outer, (randn(4, 6),), {})
    assert vars(inner) == before


def test_hooks_that_keep_what_they_see_are_refused() -> None:
    found: dict[str, Tensor] = {}

    def look(module: nn.Module, args: Any, out: Tensor) -> None:
        found["out"] = out

    made = model(lambda s, x: s.layer(x).square().sum())
    made.layer.register_forward_hook(look)
    with pytest.raises(RecordError, match=r"keeps a tensor in 'found of .*look\['out'\]'"):
        record(made, (randn(4, 6),), {})
    assert not found


def test_hooks_that_count_are_refused() -> None:
    made, calls = model(lambda s, x: s.layer(x).square().sum()), [0]

    def look(*_: Any) -> None:
        calls[0] += 1

    made.layer.register_forward_hook(look)
    with pytest.raises(RecordError, match=r"every forward changes 'calls of .*look\[0\]'"):
        record(made, (randn(4, 6),), {})
    assert calls == [0]


def test_a_function_that_remembers_what_it_made() -> None:
    """What one recording leaves in its cache is no tensor of the next, nor of eager."""
    made = model(lambda s, x: (s.layer(x) * remembered(6)).square().sum())
    for samples in (4, 8):
        check(made, randn(samples, 6))


def branching(s: Any, x: Tensor) -> Any:
    s.calls += 1
    return s.layer(x) * 2 if x.sum() > 0 else s.layer(x)


def test_a_module_that_counts_cannot_run_as_it_is() -> None:
    inner = model(branching, calls=0)
    outer = Small(lambda s, x: s.inner(s.layer(x)).sum(), layer=linear(), inner=inner)
    with pytest.raises(RecordError, match="control flow depends on the data") as caught:
        record(outer, (randn(4, 6),), {})
    notes = getattr(caught.value, "__notes__", [])
    assert any("every forward changes 'calls'" in note for note in notes)


class Shared:
    """Keeps one of itself, and counts."""

    instance: Any = None
    number = 0

    @classmethod
    def get(cls) -> Shared:
        if cls.instance is None:
            cls.instance = cls()
        found: Shared = cls.instance
        return found


context = contextvars.ContextVar("context", default=0)


def from_environment(s: Any) -> float:
    os.environ["MERAKC_TEST"] = str(int(os.environ.get("MERAKC_TEST", "0")) + 1)
    return float(os.environ["MERAKC_TEST"])


def from_class(s: Any) -> float:
    Shared.get().number += 1
    return float(Shared.get().number)


def from_context(s: Any) -> float:
    context.set(context.get() + 1)
    return float(context.get())


def from_slots(s: Any) -> float:
    s.outside.number += 1
    return float(s.outside.number)


class Slots:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


def numbers() -> Any:
    yield from range(1, 99)


# Where a number comes from that is another one in each forward.
OUTSIDE: dict[str, tuple[Callable[[Any], float], Any]] = {
    "an iterator": (lambda s: next(s.outside), lambda: iter(range(1, 99))),
    "a cycle": (lambda s: next(s.outside), lambda: itertools.cycle([1.0, 1.0, 2.0])),
    "a generator": (lambda s: next(s.outside), numbers),
    "slots": (from_slots, Slots),
    "an object of a class": (from_class, lambda: None),
    "a context": (from_context, lambda: None),
    "the environment": (from_environment, lambda: None),
    "a clock": (lambda s: time.time() // 86400, lambda: None),
    "a text": (lambda s: s.outside.write("x") + len(s.outside.getvalue()), io.StringIO),
    "a generator of numpy's": (lambda s: float(np.random.default_rng().random()), lambda: None),
    "one of Python's": (lambda s: random.Random().random(), lambda: None),
    "the system": (lambda s: uuid.uuid4().int % 2 + 1.0, lambda: None),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_numbers_that_the_next_forward_would_have_others_of_are_refused(name: str) -> None:
    take, make = OUTSIDE[name]
    made = model(lambda s, x: s.layer(x).square().sum() * take(s), outside=make())
    try:
        with pytest.raises(
            RecordError, match=r"every forward|second computes|the second forward|the system"
        ):
            record(made, (randn(4, 6),), {})
    finally:
        Shared.instance, Shared.number = None, 0
        os.environ.pop("MERAKC_TEST", None)


@functools.lru_cache
def doubled(layer: nn.Linear) -> Tensor:
    return layer.weight.detach() * 2


def test_a_function_that_remembers_weights_is_refused() -> None:
    """In one process it would have those of the first step for ever."""
    made = model(lambda s, x: (s.layer(x) + x @ doubled(s.layer)).square().sum())
    with pytest.raises(RecordError, match="made in another recording and kept outside the model"):
        record(made, (randn(4, 6),), {})


def given_more(s: Any, x: Tensor) -> Any:
    s.more = nn.Parameter(torch.ones(6, dtype=F64))
    return (s.layer(x) * s.more).sum()


def swapped(s: Any, x: Tensor) -> Any:
    s.layer = nn.Identity()
    return (s.layer(x) * s.table).sum()


def saved_late(s: Any, x: Tensor) -> Any:
    s.register_buffer("late", torch.ones(6, dtype=F64))
    return (s.layer(x) * s.late).sum()


PARTS = {"parameter 'more'": given_more, "module 'layer'": swapped, "buffer 'late'": saved_late}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_a_forward_makes_are_refused(name: str) -> None:
    with pytest.raises(RecordError, match=f"makes, replaces or takes away the {name}"):
        record(model(PARTS[name]), (randn(4, 6),), {})

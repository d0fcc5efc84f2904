"""What is seen of the state that a model's Python keeps, and that it is put back."""

from __future__ import annotations

import functools
import itertools
import os
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import merakc
from merakc.frontend.python.content import describe, tensors_in
from merakc.frontend.python.state import PythonState
from merakc.frontend.python.watch import WatchedState

calls = 0
seen: list[int] = []


class Memory:
    """An object of the user's."""

    def __init__(self) -> None:
        self.steps, self.inner = 0, SimpleNamespace(values=[1, 2])


def counting() -> None:
    globals()["calls"] = calls + 1


def closed() -> tuple[Callable[[], None], Callable[[], int]]:
    total = 0

    def add() -> None:
        nonlocal total
        total += 1

    return add, lambda: total


class Keeps(nn.Module):
    """One of everything that a forward may keep something in."""

    shared = 0
    table: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.number, self.text, self.late = 1, "a", None
        self.things, self.pairs = [1, [2, 3]], {"a": {"b": 1}}
        self.names, self.queue, self.counted = {"x"}, deque([1, 2], maxlen=2), Counter("ab")
        self.ordered, self.default = OrderedDict(a=1), defaultdict(list, a=[1])
        self.memory, self.array, self.numbers = Memory(), np.zeros(3), itertools.count()
        self.random, self.numpy = random.Random(0), np.random.default_rng(0)
        self.generator = torch.Generator()
        self.add, self.total = closed()
        self.partly = functools.partial(dict.update, self.pairs)

    def forward(self, kept: list[int] = seen, *, more: int = 1) -> None:
        kept.append(more)
        counting()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number": (lambda m: setattr(m, "number", 2), "number"),
    "its type": (lambda m: setattr(m, "number", True), "number"),
    "a new attribute": (lambda m: setattr(m.layer, "more", 2), "layer.more"),
    "a tensor": (lambda m: setattr(m, "late", torch.ones(1)), "late"),
    "an attribute taken away": (lambda m: delattr(m, "text"), "text"),
    "a list": (lambda m: m.things.append(1), "things[2]"),
    "a list in a list": (lambda m: m.things[1].pop(), "things[1][1]"),
    "a mapping in a mapping": (lambda m: m.pairs["a"].update(b=2), "pairs['a']['b']"),
    "a set": (lambda m: m.names.clear(), "names['x']"),
    "another in a set": (lambda m: (m.names.clear(), m.names.add("y")), "names['x']"),
    "a queue": (lambda m: m.queue.append(3), "queue[0]"),
    "a counter": (lambda m: m.counted.update("a"), "counted['a']"),
    "an ordered mapping": (lambda m: m.ordered.update(b=1), "ordered['b']"),
    "a mapping of defaults": (lambda m: m.default["b"], "default['b']"),
    "an object": (lambda m: setattr(m.memory, "steps", 1), "memory.steps"),
    "an object in an object": (lambda m: m.memory.inner.values.clear(), "memory.inner.values[0]"),
    "an array": (lambda m: m.array.fill(1), "array"),
    "a closure": (lambda m: m.add(), "total of closed.<locals>.add"),
    "an attribute of the class": (lambda m: setattr(type(m), "shared", 3), "Keeps.shared"),
    "a mapping of the class": (lambda m: m.table.update(a=1), "Keeps.table['a']"),
    "a global": (lambda m: counting(), "tests.frontend.python.test_state.calls"),
    "a default": (lambda m: seen.append(1), "a default of Keeps.forward[0]"),
    "a keyword's default": (
        lambda m: type(m).forward.__kwdefaults__.update(more=2),
        "a default of Keeps.forward['more']",
    ),
    "a new buffer": (lambda m: m.register_buffer("more", torch.ones(1)), "more"),
    "a buffer taken away": (lambda m: delattr(m, "steps"), "steps"),
    "a module": (lambda m: m.add_module("more", nn.Linear(1, 1)), "more"),
    "a mode": (lambda m: m.layer.eval(), "layer.training"),
    "a hook": (lambda m: m.register_forward_hook(lambda *_: None), "_forward_hooks[0]"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen_and_put_back(name: str) -> None:
    model = Keeps()
    state, before = PythonState(model), describe(model)
    kept = dict(vars(Keeps)), calls, list(seen), model.total()
    assert state.changes() == []
    act, wanted = CHANGES[name]
    act(model)
    names = {c.name if name != "a hook" else "_forward_hooks[0]" for c in state.changes()}
    assert wanted in names
    state.put_back()
    assert state.changes() == []
    assert describe(model) == before
    assert (dict(vars(Keeps)), calls, list(seen), model.total()) == kept


@pytest.mark.parametrize("name", ["numbers", "random", "numpy", "generator"])
def test_generators_that_advance_are_seen(name: str) -> None:
    model = Keeps()
    state = PythonState(model)
    generator = getattr(model, name)
    draws: dict[str, Callable[[], Any]] = {
        "numbers": lambda: next(generator),
        "random": lambda: generator.random(),
        "numpy": lambda: generator.random(),
        "generator": lambda: torch.rand(1, generator=generator),
    }
    draws[name]()
    assert [c.name for c in state.changes()] == [name]


def test_what_is_written_into_tensors_is_no_change() -> None:
    model = Keeps()
    state = PythonState(model)
    with torch.no_grad():
        model.steps.add_(1)
        model.layer.weight.zero_()
    model.steps = torch.ones(())  # a buffer's new value, which a recording keeps
    assert state.changes() == []
    state.put_back()
    assert float(model.steps) == 1.0


def test_a_mapping_that_makes_what_it_is_asked_for() -> None:
    class Makes(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise AssertionError

    model = nn.Module()
    model.table = Makes(a=1)  # type: ignore[assignment]
    state = PythonState(model)
    model.table["b"] = 2  # type: ignore[operator, index]
    assert [c.name for c in state.changes()] == ["table['b']"]
    state.put_back()
    assert list(model.table) == ["a"]  # type: ignore[arg-type]


def test_tensors_are_told_by_their_forms() -> None:
    first, second = {"a": [torch.zeros(2), 1]}, {"a": [torch.ones(2), 1]}
    assert describe(first) == describe(second) != describe({"a": [torch.zeros(3), 1]})
    assert [list(map(float, x)) for x in tensors_in(second)] == [[1.0, 1.0]]
    assert list(tensors_in(Holder(Tensor()))) != []


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_names_of_the_users_code_do_not_lead_into_merakc() -> None:
    """Where merakc runs from a checkout, it is no installed library."""

    class Training(nn.Module):
        def step(self) -> None:
            """A method by the name of what trains, beside the model."""
            run_on_all()

    found = PythonState(Training())
    held = [h.value for h in found.held()]
    assert run_on_all in held
    assert merakc.auto_parallel not in held
    assert not any(isinstance(v, FunctionType) and v.__module__.startswith("merakc.") for v in held)


def run_on_all() -> Any:
    return merakc.auto_parallel


def _by_name() -> dict[str, tuple[Any, Callable[[], None]]]:
    """What code has by name alone, in ways that a model may hold it; what changes a value in it."""
    settings, inner = ModuleType("settings"), ModuleType("settings.inner")
    settings.scale, settings.inner, inner.scale = 1.0, inner, 1.0  # type: ignore[attr-defined]

    class Config:
        class Inner:
            scale = 1.0

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    target, values = Memory(), np.array([Memory()], object)
    hidden = nn.Dropout()

    def halve(holder: Any) -> Callable[[], None]:
        return lambda: setattr(holder, "scale", holder.scale / 2)

    return {
        "a module": (settings, halve(settings)),
        "a module in a list": ([settings], halve(settings)),
        "a module in a module": (settings, halve(inner)),
        "a module of Python's": (os, lambda: os.environ.update(MERAKC_TEST_SCALE="2")),
        "a class in a class": (Config, halve(Config.Inner)),
        "a class of classes": (Marked, halve(Marking)),
        "an optimizer": (optimizer, lambda: optimizer.param_groups[0].update(lr=2.0)),
        "a schedule": ([schedule], lambda: schedule._last_lr.append(1.0)),
        "a weak reference": (weakref.ref(target), lambda: setattr(target, "steps", 3)),
        "a view of a mapping": (MappingProxyType(TABLE), lambda: TABLE.update(a=TABLE["a"] + 1)),
        "an array of objects": (values, lambda: setattr(values[0], "steps", 3)),
        "the mode of a hidden module": (
            [hidden],
            lambda: hidden.train(not hidden.training) and None,
        ),
    }


TABLE = {"a": 1}


class Marking(type):
    scale = 1.0


class Marked(metaclass=Marking):
    """A class that has its numbers of its class."""


class Reads(nn.Module):
    """Reads what it holds in ways that only names tell."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self) -> Any:
        held = self.held[0] if isinstance(self.held, list) else self.held
        if hasattr(held, "get_last_lr"):
            return held.get_last_lr()
        numbers = [held.scale, held.inner.scale, held.Inner.scale]
        return [*numbers, held.environ["MERAKC_TEST_SCALE"], held.param_groups[0]["lr"]]


@pytest.mark.parametrize("name", _by_name())
def test_what_code_has_by_names_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERAKC_TEST_SCALE", "1")
    held, change = _by_name()[name]
    state = WatchedState(Reads(held))
    assert not state.moved()
    assert not state.changes()
    change()
    assert state.moved()
    assert state.changes()


def test_modules_are_looked_into_for_all_that_code_names() -> None:
    """Two functions go through one module to another for different names."""
    outer, inner = ModuleType("outer"), ModuleType("outer.inner")
    outer.inner, inner.one, inner.other = inner, 1, 2  # type: ignore[attr-defined]
    space = {"outer": outer, "__name__": "users"}
    exec("def one(self): return outer.inner.one\ndef other(self): return outer.inner.other", space)
    kind = type("Both", (nn.Module,), {"one": space["one"], "other": space["other"]})
    state = PythonState(kind())
    inner.other = 3  # type: ignore[attr-defined]
    assert [c.name for c in state.changes()] == ["outer.inner.other"]


def test_names_that_are_made() -> None:
    settings = ModuleType("settings")
    settings.scale_a = 1.0  # type: ignore[attr-defined]

    class Made(nn.Module):
        def forward(self, kind: str) -> Any:
            return getattr(settings, f"scale_{kind}")

    state = PythonState(Made())
    settings.scale_a = 2.0  # type: ignore[attr-defined]
    assert [c.name for c in state.changes()] == ["settings.scale_a"]

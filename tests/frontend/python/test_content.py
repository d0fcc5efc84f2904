"""What objects hold: seen when it changes, described, and put back where it can be."""

from __future__ import annotations

import array
import contextvars
import io
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from merakc.errors import RecordError
from merakc.frontend.python.content import (
    MAX_ARRAY_BYTES,
    Names,
    content_hash,
    content_of,
    describe,
    put_back,
    same,
    tensors_in,
)


class Slots:
    """Has no dict."""

    __slots__ = ("items", "number")

    def __init__(self) -> None:
        self.number, self.items = 0, [1]


@dataclass(slots=True)
class Fields:
    """Neither has it."""

    number: int = 0


class Listed(list[int]):
    """A list with an attribute."""

    number = 0


class Table(dict[str, int]):
    """A mapping with one."""

    number = 0


class Slotted(list[int]):
    """A list with a place for one."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        super().__init__([1])
        self.number = 0


@dataclass
class Node:
    """One of a chain."""

    inner: list[Any] = field(default_factory=list)


def counting() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def local() -> threading.local:
    made = threading.local()
    made.number = 0
    return made


def one_more(x: Any) -> None:
    x.number += 1


def grown(x: Any) -> None:
    x[0] += 1


USUAL = "default_factory"
context = contextvars.ContextVar("context", default=0)
Case = tuple[Callable[[], Any], Callable[[Any], Any], bool]
# What is made, how it changes, whether it can be put back.
CASES: dict[str, Case] = {
    "slots": (Slots, one_more, True),
    "a dataclass of slots": (Fields, one_more, True),
    "a list with attributes": (lambda: Listed([1]), one_more, True),
    "a list with attributes, grown": (lambda: Listed([1]), grown, True),
    "a mapping with attributes": (lambda: Table(a=1), one_more, True),
    "a list with slots": (Slotted, one_more, True),
    "a mapping's usual": (lambda: defaultdict(int), lambda x: setattr(x, USUAL, None), True),
    "bytes": (lambda: bytearray(4), grown, True),
    "numbers": (lambda: array.array("d", [0.0]), grown, True),
    "an array": (lambda: np.zeros(3), grown, True),
    "a large array": (lambda: np.zeros(MAX_ARRAY_BYTES), grown, False),
    "a variable of a context": (lambda: context, lambda x: x.set(x.get() + 1), True),
    "of a thread": (local, one_more, True),
    "a generator": (counting, next, False),
    "a count": (itertools.count, next, False),
    "a cycle": (lambda: itertools.cycle([1, 1]), next, False),
    "pairs of neighbors": (lambda: itertools.pairwise([1, 1, 1]), next, False),
    "of a list": (lambda: iter([1, 1]), next, False),
    "of a range": (lambda: iter(range(9)), next, False),
    "pairs": (lambda: zip(range(9), range(9), strict=True), next, False),
    "text": (io.StringIO, lambda x: x.write("x"), False),
}


@pytest.mark.parametrize("name", CASES)
def test_changes_are_seen(name: str) -> None:
    make, act, is_put_back = CASES[name]
    thing = make()
    before, told = content_of(thing), describe(thing)
    assert before is not None
    assert describe(thing) == told
    act(thing)
    assert describe(thing) != told
    put_back(thing, before)
    assert (describe(thing) == told) is is_put_back


def test_an_iterator_that_does_not_say_where_it_stands_is_refused() -> None:
    with pytest.raises(RecordError, match="holds a memory_iterator, and Python does not say"):
        content_of(iter(memoryview(b"x")))


def test_containers_are_looked_into_at_any_depth_and_circles_end() -> None:
    chain: list[Any] = [0]
    for _ in range(50):
        chain = [chain]
    before, inner = describe(chain), chain
    while isinstance(inner[0], list):
        inner = inner[0]
    inner[0] = 1
    assert describe(chain) != before
    node = Node()
    node.inner.append(node)
    describe(node)


def test_what_many_hold_is_looked_into_once() -> None:
    shared: list[Any] = [0]
    bottom = shared
    for _ in range(100):  # 2 ** 100 ways down
        shared = [shared, shared]
    before = describe(shared)
    bottom[0] = 1
    assert describe(shared) != before
    assert describe([[1], [1]]) == describe([bottom, bottom])


def test_leaves_may_be_told_otherwise() -> None:
    first, second = torch.zeros(2), torch.ones(2)
    assert describe([first]) == describe([second])
    assert describe([first], content_hash) != describe([second], content_hash)
    assert content_hash(first) == content_hash(torch.zeros(2)) != content_hash(torch.zeros(2, 1))
    assert "float32" in content_hash(first.to("meta"))
    assert list(tensors_in({"a": [first]})) == [first]


def test_namespaces_hold_state_alone() -> None:
    space = {"__name__": "here", "number": 1, "function": one_more, "Class": Slots, "d": {}}
    assert Names(space, ("number", "function", "Class", "d", "gone")).content() == {
        "number": 1,
        "d": {},
    }
    keyed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    assert Names({"__name__": "here", "k": keyed}, ("k",)).content() == {"k": keyed}


def test_equal_plain_values_are_the_same() -> None:
    assert same(1.5, 1.5)
    assert same(float("nan"), float("nan"))
    assert not same(1, True)
    assert not same([1], [1])

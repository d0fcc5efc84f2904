"""What forwards leave in attributes: put there where it is plain, refused when used where not."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from merakc.errors import ConfigError
from merakc.frontend.left import NotLeft
from merakc.frontend.record import record
from tests.frontend.small import Small, linear, randn


def forward(s: Any, x: Tensor) -> Tensor:
    y: Tensor = s.layer(x)
    s.size, s.table["n"], s.inner.width = len(x), len(x), x.shape[1]
    s.kept, s.table["y"], s.pair[0] = y, {"y": [y]}, (1, y.detach())
    s.last = y.sum().item()
    s.recent.append(len(x))
    return y.square().sum()


def made() -> Small:
    model = Small(forward, layer=linear())
    model.size, model.kept, model.last = 0, None, 0.0  # type: ignore[assignment]
    model.table, model.pair = {}, [1, 2]  # type: ignore[assignment]
    model.inner, model.recent = SimpleNamespace(), deque([4, 4], maxlen=2)  # type: ignore[assignment]
    return model


def test_what_a_forward_leaves_is_put_and_taken_back() -> None:
    model: Any = made()
    found = record(model, (randn(4, 6),), {}).left
    assert model.size == 0
    assert [left.put() for left in found].count(True) == len(found)
    assert not any(left.put() for left in found)
    assert (model.size, model.table["n"], model.inner.width) == (4, 4, 6)
    for thing in (model.kept, model.table["y"], model.pair[0], model.last):
        assert isinstance(thing, NotLeft)
    assert model.recent == deque([4, 4])
    for left in found:
        left.take_back()
    assert (model.size, model.kept, model.pair, model.last) == (4, None, [1, 2], 0.0)
    assert model.table == {"n": 4}


def test_what_the_user_has_put_there_stays() -> None:
    model: Any = made()
    found = record(model, (randn(4, 6),), {}).left
    for left in found:
        left.put()
    model.kept, model.other = 7, 8
    for left in found:
        left.take_back()
    assert (model.kept, model.other) == (7, 8)


def test_any_use_of_what_is_not_there_is_refused() -> None:
    thing: Any = NotLeft("aux")
    assert thing is not None
    for use in (float, len, bool, iter, str.format, lambda t: t + 1, lambda t: t.item(),
                lambda t: f"{t:.2f}"):  # fmt: skip
        with pytest.raises((ConfigError, TypeError), match=r"'aux'|descriptor") as caught:
            use(thing)
        assert isinstance(caught.value, ConfigError) or use is str.format
    assert repr(copy.deepcopy(thing)) == repr(pickle.loads(pickle.dumps(thing))) == repr(thing)

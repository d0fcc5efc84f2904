"""Plain data come back as they were, and code is refused."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merakc.errors import CheckpointError
from merakc.train.checkpoints.codec import decode, encode

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters()),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
DATA = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text(st.characters()), st.integers(), st.just("__kind__")),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, tensors, "x"))), tensors)


@given(DATA)
def test_plain_data_come_back(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert repr(found) == repr(value)


def test_tensors_arrays_and_random_states_come_back() -> None:
    given_ = {"a": [torch.arange(3)], "b": np.float32(2.5), "c": np.arange(4), "d": math.nan}
    found = there_and_back(given_)
    assert torch.equal(found["a"][0], torch.arange(3))
    assert found["b"] == np.float32(2.5)
    assert type(found["b"]) is np.float32
    assert np.array_equal(found["c"], np.arange(4))
    assert math.isnan(found["d"])
    random.setstate(there_and_back(state := random.getstate()))
    assert random.getstate() == state
    np.random.set_state(there_and_back(np.random.get_state()))
    assert there_and_back(torch.bfloat16) is torch.bfloat16


def test_schedules_with_counters_come_back() -> None:
    """SequentialLR has the milestones of MultiStepLR counted as it comes to it."""
    kinds = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = kinds.SequentialLR(
        optimizer, [kinds.ConstantLR(optimizer, 0.1, 2), kinds.MultiStepLR(optimizer, [1, 1])], [3]
    )
    schedule.load_state_dict(there_and_back(schedule.state_dict()))
    rates = []
    for _ in range(5):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.01, 0.1, 0.1, 0.001, 0.001])
    assert there_and_back(given_ := {"a": Counter({(1, 2): 3})}) == given_


def test_tensors_whose_names_would_be_one_stay_two() -> None:
    found = there_and_back({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})
    assert (found["a.b"], found["a"]["b"]) == (torch.zeros(1), torch.ones(1))
    assert torch.equal(there_and_back(conj := torch.tensor([1 + 2j]).conj()), conj)
    assert np.array_equal(there_and_back(np.arange(3).astype(">f4")[::-1]), [2, 1, 0])


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


def test_what_could_not_be_read_back_is_refused() -> None:
    encode(nested(43), {}, "x")
    endless: list[Any] = []
    endless.append(endless)
    for value in (nested(44), nested(400), endless):
        with pytest.raises(CheckpointError, match=r"x cannot be kept .* deeper than 43"):
            encode(value, {}, "x")
    with pytest.raises(CheckpointError, match=r"x cannot be kept .*4300 digits"):
        encode(10**5000, {}, "x")
    for tensor in (torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(CheckpointError, match=r"x is a Tensor .*: give a dense tensor"):
            encode(tensor, {}, "x")


NEED_CODE = {
    "object": object(), "set": {1, 2}, "function": lambda: None, "range": [range(3)],
    "class": {"a": int}, "words": np.array(["a"]), "date": np.datetime64("2020-01-01"),
    "objects": np.array([{}], dtype=object),
}  # fmt: skip


@pytest.mark.parametrize("value", NEED_CODE.values(), ids=NEED_CODE)
def test_what_would_need_code_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"x.* is a .*, which a checkpoint cannot hold"):
        encode(value, {}, "x")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"__kind__": "call"}, "unknown kind"),
        ({"__kind__": "dtype", "value": "load"}, "unknown kind"),
        ({"__kind__": "tensor", "name": "gone"}, "damaged: .*gone"),
        ({"__kind__": "tensor", "name": ["x"]}, "damaged"),
        ({"__kind__": "float", "value": "x"}, "damaged"),
        ({"__kind__": "mapping", "items": [[{}, 1]]}, "damaged"),
        ([{"__kind__": "tuple"}], "damaged"),
    ],
)
def test_what_no_encode_makes_is_refused(value: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        decode(value, {})

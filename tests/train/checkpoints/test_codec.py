"""Plain data come back as they were, and code is refused."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merakc.errors import CheckpointError
from merakc.train.checkpoints.codec import decode, encode

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
DATA = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text(), st.integers(), st.just("__kind__")), inner, max_size=3
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


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: None, [range(3)], {"a": int}])
def test_what_would_need_code_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"x.* is a .*, which a checkpoint cannot hold"):
        encode(value, {}, "x")


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(CheckpointError, match="unknown kind 'call'"):
        decode({"__kind__": "call"}, {})

"""What a forward returns that no step gives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from merakc.errors import ConfigError
from merakc.frontend.values.absent import Absent

OUTPUT = Absent("past", "Cache")


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.get_seq_length(), lambda x: x[0], len, list, bool, lambda x: x(),
        lambda x: 1 in x,
    ],
)  # fmt: skip
def test_what_is_asked_of_it_is_an_error(ask: Callable[[Any], object]) -> None:
    with pytest.raises(ConfigError, match="output 'past' is a Cache, which its forward makes"):
        ask(OUTPUT)


def test_it_may_be_held() -> None:
    for made in (copy.deepcopy(OUTPUT), pickle.loads(pickle.dumps(OUTPUT))):
        assert made == OUTPUT
    assert repr(OUTPUT) == "Absent(output='past', kind='Cache')"

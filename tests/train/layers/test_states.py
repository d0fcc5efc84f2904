from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from merakc.errors import ConfigError
from merakc.train.layers.states import State


def test_every_kind_of_state_is_copied_and_can_be_put_back() -> None:
    old, kept, stranger = (nn.Parameter(torch.full((2,), float(k))) for k in range(3))
    optimizer = torch.optim.AdamW([("w", old), ("k", kept), ("s", stranger)])
    inside = {"step": 7, "many": [torch.ones(1), {"deep": torch.zeros(())}]}
    optimizer.state[old], optimizer.state[stranger] = inside, {"step": 1}
    now: dict[str, Any] = {"w": nn.Parameter(old.data), "v": nn.Parameter(old.data), "k": kept}
    with ExitStack() as undo:
        State([optimizer], {old: "w", kept: "k"}).move(now, {"w": "w", "v": "w", "k": "k"}, undo)
        group = optimizer.param_groups[0]
        assert group["params"] == [*now.values(), stranger]
        assert group["param_names"] == ["w", "v", "k", "s"]
        assert optimizer.state.keys() == {now["w"], now["v"], stranger}
        for name in ("w", "v"):
            assert optimizer.state[now[name]] == inside
            assert optimizer.state[now[name]]["many"][0] is not inside["many"][0]
    assert group["params"] == [old, kept, stranger]
    assert group["param_names"] == ["w", "k", "s"]
    assert optimizer.state == {old: inside, stranger: {"step": 1}}


def test_state_of_several_parameters_is_refused() -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="LBFGS updates parameters together"):
        State([torch.optim.LBFGS([p])], {p: "p"})

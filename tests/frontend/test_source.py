"""Whose line a call is said to come from."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from merakc.frontend.source import user_line
from tests.frontend.small import here


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.lines.append(user_line())
        return func(*args, **(kwargs or {}))


class PassOn(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_line_is_the_users_and_not_that_of_a_mode() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)  # through torch's own frames

    for outer in (contextlib.nullcontext(), PassOn()):
        watch = Watch()
        x = torch.ones(2)
        with outer, watch:
            run(x)
        assert watch.lines == [here(run)]

"""Modules in a line, for tests."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from merakc.frontend.source import INSTALLED

WIDTH = 6


class Small(nn.Module):
    """A forward given as a function of the module and its arguments, over named parts."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def here(function: Callable[..., Any], offset: int = 1) -> str:
    """`file:line` of the `offset`-th line after the first of a function."""
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}"


def as_installed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as an installed library would have it."""
    code = function.__code__.replace(co_filename=f"{INSTALLED[0]}/library.py")
    return FunctionType(code, function.__globals__, function.__name__)

"""Whether an optimizer's step runs: within one, what a rank holds is updated as plain tensors."""

from __future__ import annotations

import sys
from functools import cache
from types import FrameType
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class _State:
    """The frame of the optimizer's step that runs, if one does."""

    frame: FrameType | None = None


_state = _State()


def is_stepping() -> bool:
    """Whether a step runs; one that ended in an error has left its frame here."""
    if _state.frame is None:
        return False
    try:
        _state.frame.clear()
    except RuntimeError:  # it is executing
        return True
    _state.frame = None
    return False


@cache
def watch_optimizers() -> None:
    """Has steps noted from here on. Whether an optimizer may update what a rank holds is tried
    before its first.
    """

    def before(*_: Any) -> None:
        if not is_stepping():
            _state.frame = sys._getframe(1)

    def after(*_: Any) -> None:
        if _state.frame is sys._getframe(1):
            _state.frame = None

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)

"""The line of the user's code that is running."""

from __future__ import annotations

import sys

import torch

# torch's own frames, and those of this package, are not the user's.
_OURS = (torch.__file__.rpartition("/")[0], __file__.rpartition("/")[0], "<")


def user_line() -> str:
    """`file:line` of the innermost frame outside torch and the recorder; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""

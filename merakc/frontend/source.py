"""The line of the user's code that is running."""

from __future__ import annotations

import sys
from functools import lru_cache
from types import CodeType, FrameType

import torch
import typing_extensions

from merakc.errors import LIBRARIES, STDLIB

# torch's own frames, and those of this package, are not the user's; nor are the modes and tensor
# subclasses that stand between a call and torch.
_OURS = (
    torch.__file__.rpartition("/")[0],
    __file__.rpartition("/")[0],
    f"{__file__.rpartition('/frontend/')[0]}/train/outside/",
    typing_extensions.__file__,  # which marks functions of torch's as deprecated
    "<",
)
INSTALLED = (*LIBRARIES, STDLIB)
# Code that makes calls of the user's again: `line` in its frames says where they were made first.
REPEATS: dict[str, CodeType] = {}  # by name
MOST_FILES = 4096
_HOOKS = ("__torch_function__", "__torch_dispatch__")


def user_line() -> str:
    """`file:line` of the innermost frame outside torch and the recorder; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # a dozen of them for every call that is recorded
        code = frame.f_code  # neither hashed, which takes long, nor by its `id`: Python tells of it
        if not _passes_on(code):
            return f"{code.co_filename}:{frame.f_lineno}"
        if REPEATS.get(code.co_name) is code:
            return str(frame.f_locals["line"])
        frame = frame.f_back
    return ""


def is_users(code: CodeType) -> bool:
    """Whether code is neither torch's nor of this package."""
    return not _passes_on(code)


def is_installed(code: CodeType) -> bool:
    """Whether code is that of an installed library, torch among them."""
    return code.co_filename.startswith(LIBRARIES)


def called_by_a_library() -> bool:
    """Whether what called merakc's code last is an installed library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_installed(frame.f_code)


def _passes_on(code: CodeType) -> bool:
    return _is_ours(code.co_filename) or code.co_name in _HOOKS


@lru_cache(maxsize=MOST_FILES)
def _is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)


def near_line(frame: FrameType | None, passed: str = "\0") -> str:
    """The line that calls, if it is of the user's own code, and not of an installed library; files
    in the folder `passed` are passed over.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith(passed)
        if (
            not ours
            and is_users(frame.f_code)
            and (name.startswith(LIBRARIES) or not name.startswith(STDLIB))
        ):
            return "" if name.startswith(LIBRARIES) else f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

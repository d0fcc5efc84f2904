"""Files that a forward writes, reads or asks for, and what else lies outside its process.

A compiled step has nothing to do with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from merakc.errors import LIBRARIES, STDLIB, RecordError
from merakc.frontend.replaced import replaced
from merakc.frontend.source import is_users

_PACKAGE = __file__.rpartition("/frontend/")[0]
_REPLACED = replaced.__wrapped__.__code__.co_filename  # type: ignore[attr-defined]
# What looks for code, for its lines when it writes a warning, and for compilers and devices; of
# torch that is all but what loads and saves.
_OF_CODE = ("importlib", "linecache", "inspect", "traceback", "torch")
_LOADS = ("torch.serialization", "torch.hub")
# Python's events (sys.audit) that a forward is refused for, and the calls of which there is none.
_EVENTS = {
    "os.listdir": "looks into a folder", "os.scandir": "looks into a folder",
    "subprocess.Popen": "starts a process", "os.system": "starts a process",
    "os.posix_spawn": "starts a process", "socket.connect": "connects to",
}  # fmt: skip
_ASKS = ("stat", "lstat", "access")
# Of each thread that records: whether it is paused.
_recording: dict[int, Callable[[], bool]] = {}


@contextlib.contextmanager
def no_files(paused: Callable[[], bool]) -> Iterator[None]:
    """Refuses it in code of the user's, and of libraries that it calls, unless `paused`.

    What libraries look for by themselves, which packages there are, is the same in every step.
    """
    _listen()
    thread = threading.get_ident()
    outer = _recording.get(thread)
    with contextlib.ExitStack() as stack:
        for name in _ASKS:
            stack.enter_context(replaced(os, name, _refusing(getattr(os, name))))
        _recording[thread] = paused
        try:
            yield
        finally:
            del _recording[thread]
            if outer is not None:
                _recording[thread] = outer


def _refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _check("looks for a file", *args[:1])
        return plain(*args, **kwargs)

    return call


@functools.cache
def _listen() -> None:
    """Hears Python's events from now on; nothing takes that back."""
    sys.addaudithook(_heard)


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if not _recording:
        return
    if event == "open":
        path, _, flags = args
        _check("writes" if flags & (os.O_WRONLY | os.O_RDWR) else "reads a file", path)
    elif event in _EVENTS:
        _check(_EVENTS[event], args[-1] if event == "socket.connect" else args[0])


def _check(does: str, thing: Any = ".") -> None:
    paused = _recording.get(threading.get_ident())
    if paused is None or paused() or not (line := _line()):
        return
    if does == "writes":
        raise RecordError(
            f"{line}: the forward writes to a file ({thing}), which a compiled step does not; "
            "return what it writes, and write it outside"
        )
    raise RecordError(
        f"{line}: the forward {does} ({thing}), and a step is compiled from what stood there once; "
        "do it before auto_parallel, and give what comes of it in the batch, or as an attribute "
        "of the model"
    )


def _line() -> str:
    """The line of the user's that is running, if a call comes from it and not from merakc."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in (__file__, _REPLACED):
        frame = frame.f_back
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__") or ""
        ours = code.co_filename.startswith(_PACKAGE)
        if ours or (module.partition(".")[0] in _OF_CODE and module not in _LOADS):
            return ""
        if is_users(code) and not code.co_filename.startswith((*LIBRARIES, STDLIB)):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

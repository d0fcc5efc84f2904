"""An arena for an executor's steps on a CPU: every value gets the place that was found for it.

The second step is recorded (`allocator.cpp`): the first also makes what is kept for good. What it
asks torch's allocator for, and when each piece is freed, gives lives, and these places
(`merakc.analysis.addresses`); values, receives and what kernels take beside them alike. From the
third step on requests get their places. What is asked for otherwise than in the recorded step, by
opaque parts, say, and what outlives a step comes from the allocator as ever. Nothing rests on the
plan being right: a place is given only while nobody uses a byte of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from merakc.analysis.addresses import place
from merakc.analysis.lives import Life
from merakc.errors import ConfigError

_C: Final[Any] = ctypes.CDLL(None)
SOURCE: Final = Path(__file__).with_name("allocator.cpp")
RECORDED_STEP: Final = 1
# As many of the largest requests as a second or two find places for; others come from elsewhere,
# which a heap has room for among what is large.
MOST_PLACED: Final = 10_000
# Whether what is freed is written over at once: who reads it still, gets NaN.
CHECKED: Final = os.environ.get("MERAKC_CHECK") == "1"


@cache
def load() -> Any:
    """The library of the allocator, which stands before torch's own from now on. Raises
    `ConfigError` where that cannot be.
    """
    library: Any = ctypes.CDLL(str(_compiled()))
    integer, pointer, truth = ctypes.c_int64, ctypes.c_void_p, ctypes.c_bool
    for name, returned, *taken in (
        ("install", truth), ("record", truth), ("recorded", integer), ("count", integer),
        ("requests", None, pointer), ("make", pointer, integer, integer, pointer, truth),
        ("begin", None, pointer), ("action", None, integer), ("figures", None, pointer, pointer),
        ("drop", None, pointer),
    ):  # fmt: skip
        function = getattr(library, f"arena_{name}")
        function.restype, function.argtypes = returned, taken
    if not library.arena_install():
        raise ConfigError(
            "arena=True stands before torch's allocator of CPU memory, and this process has "
            "another one whose memory it cannot free; leave arena away"
        )
    return library


def _compiled() -> Path:
    """The library's file, which is compiled once for each user and version of torch."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second
    from torch._inductor.exc import InvalidCxxCompiler
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    source = SOURCE.read_bytes()
    mark = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    path = Path(cache_dir()) / f"merakc-arena-{mark}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    torchs, own = Path(torch.__file__).parent, path.with_suffix(f".{os.getpid()}")
    try:
        command = [get_cpp_compiler(), "-O2", "-std=c++20", "-shared", "-fPIC", str(SOURCE)]
        command += [f"-I{torchs / 'include'}", f"-L{torchs / 'lib'}", "-lc10", "-o", str(own)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (InvalidCxxCompiler, OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        raise ConfigError(
            f"arena=True compiles an allocator, and that failed: {said}; install g++ or clang, "
            "name one in the environment variable CXX, or leave arena away"
        ) from error
    own.replace(path)  # at once, whoever else compiles it
    return path


@dataclass(frozen=True, slots=True)
class Figures:
    """Of an arena and the last step in it.

    `bound_bytes` are the most of its bytes that are used at once. `missed` requests got no place
    though they were in the recorded step, or were not in it.
    """

    size_bytes: int
    bound_bytes: int
    placed: int
    missed: int
    missed_bytes: int


class Anywhere:
    """Memory as torch's allocator has it; `at` is the action of the Program that runs."""

    def __init__(self) -> None:
        self.at = 0

    def step(self) -> AbstractContextManager[None]:
        """A step of this thread."""
        return nullcontext()

    def begin(self, action: int) -> None:
        """What is asked for from now on is for this action."""
        self.at = action


class Places(Anywhere):
    """Where the requests of an executor's steps lie."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        if device.type != "cpu":
            raise ConfigError(
                f"arena=True is for ranks that compute on a CPU, and this one does on {device}; "
                "leave arena away"
            )
        self.library, self.steps, self.arena = load(), 0, ctypes.c_void_p()
        self.size_bytes = self.bound_bytes = self.requests = 0
        self.ended: int | None = None  # when a recorded step did, until there is an arena for it

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of this thread: one is recorded, later ones are in the arena."""
        library, number = self.library, self.steps
        self.steps += 1
        if self.ended is not None:
            self._make(self.ended, library.arena_count())
            self.ended = None
        records = number >= RECORDED_STEP and not self.arena and library.arena_record()
        library.arena_begin(self.arena)
        try:
            yield
        except BaseException:
            if records:
                library.arena_recorded()
                library.arena_count()
            raise
        else:
            self.ended = library.arena_recorded() if records else None
        finally:
            library.arena_begin(None)

    def begin(self, action: int) -> None:
        """What is asked for from now on is for this action."""
        super().begin(action)
        self.library.arena_action(action)

    def _make(self, ended: int, count: int) -> None:
        """Finds places for what was recorded until the moment `ended`; what was freed between then
        and now, such as gradients, is needed until the step ends.
        """
        self.requests, requests = count, np.empty((count, 4), dtype=np.int64)
        self.library.arena_requests(requests.ctypes.data)
        freed = np.flatnonzero(requests[:, 3] >= 0)
        freed = np.sort(freed[np.argsort(-requests[freed, 1], kind="stable")[:MOST_PLACED]])
        lives = [
            Life("", size, start, min(stop, ended))
            for _, size, start, stop in requests[freed].tolist()
        ]
        found = place(lives)
        places = np.column_stack((requests[:, :2], np.full(count, -1)))
        places[freed, 2] = found.offsets
        if hasattr(_C, "malloc_trim"):  # what the steps so far have left free is in its place now
            _C.malloc_trim(0)
        self.give(np.ascontiguousarray(places, dtype=np.int64), found.size_bytes)
        self.bound_bytes = found.bound_bytes

    def give(self, places: Any, size_bytes: int) -> None:
        """Takes an arena, in which requests have these `places`: rows of the action, the bytes and
        the offset, -1 for none.
        """
        made = self.library.arena_make(size_bytes, len(places), places.ctypes.data, CHECKED)
        self.arena, self.size_bytes = ctypes.c_void_p(made), size_bytes

    def figures(self) -> Figures:
        """How it went in the last step."""
        found = np.zeros(3, dtype=np.int64)
        if self.arena:
            self.library.arena_figures(self.arena, found.ctypes.data)
        placed, missed, missed_bytes = found.tolist()
        return Figures(self.size_bytes, self.bound_bytes, placed, missed, missed_bytes)

    def __del__(self) -> None:
        if getattr(self, "ended", None) is not None:
            self.library.arena_count()  # others may record
        if getattr(self, "arena", None):
            self.library.arena_drop(self.arena)

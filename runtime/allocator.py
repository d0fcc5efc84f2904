"""What the C library does with memory that a step lets go of, on ranks that compute on a CPU.

glibc returns it to the system, and the next step asks for it again page by page: of GPT-2 that was
8 of the 28 ms of some forwards. Ranks keep it instead, as torch's allocator of GPU memory does.

Such a heap grows, though no more of it is used, as steps find ever less of what is free in one
piece: of a rank of four pipeline stages from 107 to between 122 and 132 MiB in 28 steps. Whenever
it has grown, all that is free goes back, and the next step asks for what it needs: 111 to 116 MiB.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any, Final

# mallopt(3), malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER: Final = -1
# The most that glibc takes: what is larger is mapped by itself and goes back when it is freed.
LARGEST_KEPT_BYTES: Final = 32 << 20
GROWTH: Final = 1 / 64  # of what is resident, that what is free has to be given back after
STATM: Final = Path("/proc/self/statm")  # proc(5)


class KeptMemory:
    """Freed memory that this process keeps from step to step."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.settled_bytes: int | None = None  # the least after a step since then

    def settle(self) -> None:
        """After a step: gives back what is free if the process has grown since it last did."""
        statm = os.open(STATM, os.O_RDONLY)  # in every step: a `Path` reads it in ten times as long
        try:
            resident_bytes = int(os.read(statm, 256).split()[1]) * mmap.PAGESIZE
        finally:
            os.close(statm)
        if self.settled_bytes is None or resident_bytes < self.settled_bytes:
            self.settled_bytes = resident_bytes
        elif resident_bytes > self.settled_bytes * (1 + GROWTH):
            self.library.malloc_trim(0)
            self.settled_bytes = None  # known after the next step, which takes what it needs


def keep_freed_memory() -> KeptMemory | None:
    """Gives the system back what is free now, and keeps what is freed from now on.

    None where it does not: with another C library than glibc, without /proc, and where the user has
    set one of malloc's own variables (`MALLOC_TRIM_THRESHOLD_` and others, mallopt(3)).
    """
    library: Any = ctypes.CDLL(None)
    there = hasattr(library, "malloc_trim") and STATM.exists()
    if not there or any(v.startswith("MALLOC_") for v in os.environ):
        return None
    library.malloc_trim(0)
    kept = library.mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    kept = kept and library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    return KeptMemory(library) if kept else None

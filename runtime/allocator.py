"""What the C library does with memory that a step lets go of, on ranks that compute on a CPU.

glibc returns it to the system, and the next step asks for it again page by page: of GPT-2 that was
8 of the 28 ms of some forwards. Ranks keep it instead, as torch's allocator of GPU memory does.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

# mallopt(3), malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER: Final = -1
# The most that glibc takes: what is larger is mapped by itself and goes back when it is freed.
LARGEST_KEPT_BYTES: Final = 32 << 20


def keep_freed_memory() -> bool:
    """Gives the system back what is free now, and keeps what is freed from now on.

    Returns whether it does: not with another C library than glibc, nor where the user has set one
    of malloc's own variables (`MALLOC_TRIM_THRESHOLD_` and others, mallopt(3)).
    """
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim") or any(v.startswith("MALLOC_") for v in os.environ):
        return False
    library.malloc_trim(0)
    kept = library.mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    return bool(kept and library.mallopt(_M_TRIM_THRESHOLD, _NEVER))

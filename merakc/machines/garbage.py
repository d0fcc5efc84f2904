"""How often Python looks for garbage, and that it need not when it ends."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects between two searches for garbage; Python's own is 700. Imports and a compiler keep
# most of what they make, and to walk through it all again and again takes a quarter of their time.
NEW_OBJECTS = 200_000


@contextmanager
def few_collections() -> Iterator[None]:
    """While it is entered, Python looks for garbage rarely, and among new objects alone."""
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    is_outermost = 0 < before[0] < NEW_OBJECTS  # nor where the user has switched it off
    if is_outermost:
        gc.set_threshold(NEW_OBJECTS, *before[1:])
        if not frozen:
            gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if is_outermost and not frozen:
            gc.unfreeze()


def leave_garbage() -> None:
    """Lets the process end without a last search for garbage: a second, with transformers imported.

    For commands, which own their process. Objects in circles are then not told that it ends.
    """
    atexit.register(gc.freeze)

"""How often Python looks for garbage, and that it need not when it ends."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects between two searches for garbage; Python's own is 700. Imports and a compiler keep
# most of what they make, and to walk through it all again and again takes a quarter of their time.
NEW_OBJECTS = 1_000_000


class _Seen:
    """What is known of this process, and of what is forked from it.

    To count what is frozen, Python walks through all of it: a twentieth of a second for half a
    million objects, for each step that is compiled. So once something was frozen, it goes as
    frozen from then on: where it no longer is, searches look through a little more.
    """

    frozen = False
    ours = False  # while we have frozen all, and nobody else any


@contextmanager
def few_collections() -> Iterator[None]:
    """While it is entered, also inside of itself, Python looks for garbage rarely, and among new
    objects alone.
    """
    before = gc.get_threshold()
    is_outermost = 0 < before[0] < NEW_OBJECTS  # nor where the user has switched it off
    freezes = is_outermost and not _are_frozen()
    if is_outermost:
        gc.set_threshold(NEW_OBJECTS, *before[1:])
    _Seen.ours |= freezes
    if _Seen.ours:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if freezes:
            gc.unfreeze()
            _Seen.ours = False


def _are_frozen() -> bool:
    """Whether others have frozen objects, which `gc.unfreeze` would not tell from ours."""
    _Seen.frozen = _Seen.frozen or bool(gc.get_freeze_count())
    return _Seen.frozen


def leave_garbage() -> None:
    """Lets the process end without a last search for garbage: a second, with transformers imported.

    For commands, which own their process. Objects in circles are then not told that it ends.
    """
    atexit.register(gc.freeze)

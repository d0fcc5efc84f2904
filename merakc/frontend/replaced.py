"""What stands in for a call while a forward is recorded, in the thread that records it alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    """Puts a function or property in the place of an attribute, for this thread.

    Other threads go on with what was there: a checkpoint that is written, or a batch that is read
    ahead, is no part of a forward. What was not there before is taken away again.
    """
    missing = object()
    before, found = vars(place).get(name, missing), getattr(place, name, None)
    setattr(place, name, _in_this_thread(value, found if before is missing else before))
    try:
        yield
    finally:
        if before is missing:
            delattr(place, name)
        else:
            setattr(place, name, before)


def _in_this_thread(value: Any, other: Any) -> Any:
    """A function or property that is `value` here, and `other` in all other threads."""
    if isinstance(value, property):
        setter = value.fset and in_this_thread(value.fset, other.__set__)
        return property(in_this_thread(value.fget, other.__get__), setter)
    return in_this_thread(value, other) if callable(other) else value


def in_this_thread(value: Any, other: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `value` in the thread that runs now, and `other` in all others."""
    own = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (value if threading.get_ident() == own else other)(*args, **kwargs)

    return call

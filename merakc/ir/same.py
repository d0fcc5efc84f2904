"""Equal values, kept once."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class Same:
    """Gives, for a value, the first that was equal to it: what is kept of many graphs is there
    once. It keeps all of these.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, value: T) -> T:
        """The first one."""
        first: T = self._known.setdefault(value, value)
        return first

    def mapping(self, value: dict[str, str]) -> dict[str, str]:
        """The first of a mapping, which nobody changes."""
        first: dict[str, str] = self._known.setdefault((dict, *value.items()), value)
        return first

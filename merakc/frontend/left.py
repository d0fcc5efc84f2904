"""What a forward leaves in Python for others to look at: `self.size = len(x)`, `self.aux = aux`.

A compiled step leaves it too where it is plain. In the place of a tensor it puts something that
says so when it is used, so that nobody takes an older value for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from merakc.errors import ConfigError
from merakc.frontend.python.content import MISSING, content_of, put_back, same, tensors_in
from merakc.frontend.python.state import Change
from merakc.frontend.values.symbols import is_symbolic


class NotLeft:
    """Stands for what a compiled step does not leave in an attribute; any use of it is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"NotLeft('{self._name}')"

    def _refuse(self, *_: Any) -> Any:
        raise ConfigError(
            f"the forward sets '{self._name}' to a tensor, or to what holds one, which a compiled "
            "step does not; return it from the forward: model.predict(...) gives it"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by copy, pickle, numpy, ...: it has none of those
            raise AttributeError(name)
        return self._refuse()

    __float__ = __int__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __format__ = _refuse


@dataclass(frozen=True, slots=True)
class Left:
    """One thing of it: what `holder` has under `key` before and after."""

    holder: Any
    key: Any
    before: Any
    after: Any

    def put(self) -> bool:
        """Leaves it there; whether that changes anything."""
        return not same((content_of(self.holder) or {}).get(self.key, MISSING), self.after) and (
            self._set(self.after)
        )

    def take_back(self) -> None:
        """Puts back what was there before, in the place of what stands for a tensor."""
        if isinstance(self.after, NotLeft):
            now = (content_of(self.holder) or {}).get(self.key, MISSING)
            if now is self.after:
                self._set(self.before)

    def _set(self, value: Any) -> bool:
        content = dict(content_of(self.holder) or {})
        content[self.key] = value
        if value is MISSING:
            del content[self.key]
        put_back(self.holder, content)
        return True


def left_by(changes: Sequence[Change]) -> Iterator[Left]:
    """What a forward leaves that has made these changes, while they are there."""
    for change in changes:
        if change.part or str(change.key) in ("training", "_non_persistent_buffers_set"):
            continue
        after = change.after
        if after is not MISSING and (is_symbolic(after) or any(True for _ in tensors_in(after))):
            after = NotLeft(change.name)
        yield Left(change.holder, change.key, change.before, after)

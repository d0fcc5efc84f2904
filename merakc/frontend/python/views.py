"""Views of parameters and buffers that a model's Python holds by themselves: a distribution over a
buffer, a row of a frozen weight.

In the model that trains, parameters and buffers lie in other memory than such a view. A recording
makes the view anew of the tensor that it is of, which has all that is written to that; what is
written to the view itself would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from merakc.errors import RecordError
from merakc.frontend.python.content import content_hash
from merakc.frontend.python.plain_tensors import has_memory, overlap


class Registered(Protocol):
    """A parameter or buffer of the model, by its name."""

    @property
    def name(self) -> str:
        """Its first name in the model."""

    @property
    def real(self) -> Tensor:
        """The tensor, which is on the meta device where the model that trains has its values."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor from the offset `first` on in the one `of` that name, which has these strides, or
    that one itself; `content` is a hash of its elements.
    """

    of: str
    first: int
    strides: tuple[int, ...]
    itself: bool
    content: str


class Views:
    """The views that are known of a model, from when they still were in one memory with it."""

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, View] = WeakTensorKeyDictionary()
        # By memory, and weakly: a rank keeps no whole weights for what may be views of them.
        self._registered: dict[int, list[tuple[str, ref[Tensor]]]] = {}

    def find(self, registered: Sequence[Registered], held: Iterable[Tensor]) -> None:
        """Notes which of the tensors that are `held` are views of what is registered."""
        self._registered = {}
        for one in registered:
            if has_memory(one.real):
                memory = one.real.untyped_storage()._cdata
                self._registered.setdefault(memory, []).append((one.name, ref(one.real)))
        for tensor in held:
            self._note(tensor)

    def of(self, tensor: Tensor) -> View | None:
        """What a tensor is a view of. Raises `RecordError` where it was written to by itself."""
        self._note(tensor)
        view = self._known.get(tensor)
        if view is not None and view.content != _content(tensor):
            raise RecordError(
                f"a tensor was written to that is a view of '{view.of}', which has memory of its "
                f"own in the model that trains: write to '{view.of}' of that model"
            )
        return view

    def copied(self, memo: dict[int, Any]) -> Views:
        """Those of a deep copy of the model, of which this is the memo."""
        other = copy(self)
        other._known = WeakTensorKeyDictionary(
            {memo[id(x)]: view for x, view in self._known.items() if id(x) in memo}
        )
        return other

    def _note(self, tensor: Tensor) -> None:
        if not self._registered or not has_memory(tensor):
            return
        for name, weak in self._registered.get(tensor.untyped_storage()._cdata, ()):
            real = weak()
            if real is not None and overlap(real, tensor):
                first = int(tensor.storage_offset() - real.storage_offset())
                itself, content = real is tensor, _content(tensor)
                self._known[tensor] = View(name, first, real.stride(), itself, content)


def _content(tensor: Tensor) -> str:
    """A hash of its elements, of which the recording that asks has nothing."""
    with _disable_current_modes():
        return content_hash(tensor)

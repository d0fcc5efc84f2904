"""Calls on the outputs of a model that were noted, and the model with them as one module."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from merakc.frontend.source import REPEATS
from merakc.frontend.values.outside import LossAndOutputs, WithLoss, parted
from merakc.frontend.values.structures import open_dataclasses
from merakc.frontend.values.symbols import SYMBOLIC
from merakc.train.outside.watching import named

# The keyword by which tensors of the user's that such calls read are given to the forward.
EXTRA = "outside_tensors"
# Arguments that are no tensors, and the same where they are written alike.
PLAIN = (
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, slice, type(...), torch.Size,
)  # fmt: skip
_VALUES = (torch.Tensor, *SYMBOLIC)  # what outputs and results of calls are


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a value at a place in the arguments of a noted call."""

    place: int


@dataclass(frozen=True, slots=True)
class Extra:
    """Stands for a tensor of the user's in the arguments of a noted call."""

    number: int


@dataclass(frozen=True, slots=True)
class Noted:
    """A call, and the places that its results begin at, one for each tensor among their leaves."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    first: int
    key: tuple[Hashable, ...]
    grad: bool
    autocast: tuple[torch.dtype, bool]
    line: str  # of the user's

    @property
    def name(self) -> str:
        """The function's."""
        return named(self.func)

    def reads(self) -> set[int]:
        """The places that it reads."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return {x.place for x in leaves if isinstance(x, Slot)}

    def extras(self) -> set[int]:
        """The numbers of the tensors of the user's that it reads."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return {x.number for x in leaves if isinstance(x, Extra)}

    def run(
        self,
        values: Callable[[int], Any],
        extras: Mapping[int, Any],
        device: str,
        model: Callable[..., Any] | None = None,
    ) -> list[Any]:
        """The tensors that it gives; of a call of the `model`, its outputs."""

        def given(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return values(leaf.place)
            return extras[leaf.number] if isinstance(leaf, Extra) else leaf

        args, kwargs = pytree.tree_map(given, (self.args, self.kwargs))
        line, (dtype, enabled) = self.line, self.autocast  # noqa: F841  read by `user_line`
        with torch.set_grad_enabled(self.grad), torch.autocast(device, dtype, enabled):
            out = model(*args, **kwargs) if self.func is forward and model else self.func(
                *args, **kwargs)  # fmt: skip
        return [x for x in pytree.tree_leaves(out) if isinstance(x, _VALUES)]

    def moved(self, by: int, numbers: Mapping[int, int]) -> Noted:
        """The same where its places lie further on, and the tensors have these numbers."""

        def slot(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return Slot(leaf.place + by)
            return Extra(numbers[leaf.number]) if isinstance(leaf, Extra) else leaf

        args, kwargs = pytree.tree_map(slot, (self.args, self.kwargs))
        key = key_of(self.func, args, kwargs, self.grad, self.autocast)
        return replace(self, args=args, kwargs=kwargs, first=self.first + by, key=key)


def forward(*_: Any) -> Any:
    """Stands for the model itself, among the functions that are called on outputs."""
    raise AssertionError


def key_of(
    func: Callable[..., Any], args: Any, kwargs: Any, grad: bool, autocast: Hashable
) -> tuple[Hashable, ...]:
    """The same of noted calls that do the same."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    return func, str(structure), tuple((type(x), repr(x)) for x in leaves), grad, autocast


REPEATS[Noted.run.__code__.co_name] = Noted.run.__code__


class Replay(WithLoss):
    """A model and the noted calls on its outputs: gives the value at `root` as the loss, and those
    at the places of `results`.
    """

    noted: tuple[Noted, ...]
    root: int
    results: tuple[int, ...]

    def __init__(
        self, model: nn.Module, noted: Sequence[Noted], root: int, results: Sequence[int]
    ) -> None:
        super().__init__(*parted(model))
        vars(self).update(noted=tuple(noted), root=root, results=tuple(results))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss and the results."""
        extras = kwargs.pop(EXTRA)
        first = [x for x in self._outputs(*args, **kwargs) if isinstance(x, _VALUES)]
        values: dict[int, Any] = dict(enumerate(first))
        for noted in self.noted:
            made = noted.run(values.__getitem__, extras, "cpu", self._outputs)
            values |= dict(enumerate(made, noted.first))
        return LossAndOutputs(values[self.root], {str(p): values[p] for p in self.results})

    def _outputs(self, *args: Any, **kwargs: Any) -> list[Any]:
        """What a call of the model gives."""
        outputs = super().forward(*args, **kwargs)
        open_dataclasses(outputs)
        return pytree.tree_leaves(outputs)

"""Loops over the places where a mask is true, recorded as if it were true in all of them.

`for k in counts.nonzero(): ...` goes through the experts that have rows. Which these are the data
says. That turns of others compute nothing that anyone reads is shown (`frontend/values/idle.py`),
and that Python does the same in a turn whichever came before (`frontend/hits/alike.py`). Where one
cannot be, the module runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from merakc.errors import RecordError, failure
from merakc.frontend.aliases import spec_of
from merakc.frontend.asking import SymbolsNeededError
from merakc.frontend.calls.generators import DrawnError
from merakc.frontend.opaque import UntraceableError
from merakc.frontend.selections import INDEX, NONZERO, PASSED, Selecting
from merakc.frontend.source import user_line
from merakc.frontend.values.idle import Skip, Visit, skips_of
from merakc.frontend.values.reads import Origin, ValuesNeededError, really
from merakc.frontend.values.symbols import Number
from merakc.ir.graph import Ref

SELECT, UNSQUEEZE = "aten.select.int", "aten.unsqueeze.default"
AGAIN = (UntraceableError, DrawnError, SymbolsNeededError, ValuesNeededError)
REMEDY = "let it run over all of them, whether or not they have rows"


@dataclass(eq=False)
class HitLoop:
    """A loop over the places where the mask `hit` is true: its line, the modules that run, and its
    turns so far; `whole` once all are there.
    """

    hit: Ref
    source: str
    stack: tuple[str, ...]
    visits: list[Visit] = field(default_factory=list)
    whole: bool = False

    def error(self, source: str, why: str) -> UntraceableError:
        """Why it cannot be recorded: a line, and what stands there."""
        module = self.stack[-1] if self.stack else ""
        source = source or self.source
        text = f"{source}: {why}, in a loop over what was hit, of module '{module}'; {REMEDY}"
        return UntraceableError(text, self.stack, source, why)


class Visiting(Selecting):  # type: ignore[no-untyped-call]
    """A graph that is written as calls pass, with the turns of such loops.

    Those of the places that are `left_out` are passed over.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hit_loops: list[HitLoop] = []
        self.left_out: Callable[[int], bool] = lambda place: False
        self.is_visiting = False

    def go_on_from(self, other: Visiting, left_out: Callable[[int], bool]) -> None:
        """Records what `other` has recorded, behind it, without the turns that are left out."""
        self.views, self.left_out = other.views, left_out
        self.leftovers, self.was_constant = other.leftovers, other.was_constant

    def _iterate(self, tensor: FakeTensor) -> Iterator[Any]:
        """Stands in for `Tensor.__iter__`."""
        size = None if self.paused or self.is_visiting else self._places_in(tensor)
        if size is None:
            return Tensor.__iter__(tensor)  # type: ignore[no-any-return, no-untyped-call]
        return self._turns(tensor, *size)

    def _places_in(self, tensor: FakeTensor) -> tuple[Ref, int] | None:
        """The mask in whose places a tensor goes through, and how many these can be."""
        shape: tuple[Any, ...] = spec_of(tensor).shape
        is_list = bool(shape) and shape[1:] in ((), (1,))
        if not is_list or not isinstance(shape[0], Number) or self._is_known(tensor):
            return None
        node = self.reader.maker_of(self._ref(tensor).node)
        while node is not None and node.op in PASSED:
            node = self.reader.maker_of(node.refs[0].node)
        found: tuple[Any, ...] = node.spec.shape if node is not None else ()
        if node is None or node.op != NONZERO or found != (shape[0], 1):
            return None
        maker = self.reader.maker_of(node.refs[0].node)
        size = None if maker is None else maker.outputs[node.refs[0].index]
        places = size.shape[0] if size is not None else None
        return (node.refs[0], places) if isinstance(places, int) else None

    def _turns(self, tensor: FakeTensor, hit: Ref, size: int) -> Iterator[Tensor]:
        loop = HitLoop(hit, user_line(), tuple(self.modules))
        self.hit_loops.append(loop)
        shape, dtype = tuple(tensor.shape[1:]), tensor.dtype
        for place in range(size):
            if self.left_out(place):
                continue
            first, self.is_visiting = len(self.nodes), True
            yield torch.full(shape, place, dtype=dtype)
            self.is_visiting = False
            visit = Visit(place, tuple(n.name for n in self.nodes[first:]))
            loop.visits.append(visit)
        loop.whole = True

    def _formatted(self, tensor: FakeTensor, how: str = "") -> str:
        """Stands in for `Tensor.__format__`: what follows from nothing can be written out."""
        if not self.paused and not tensor.dim() and self._is_constant(tensor):
            return format(tensor.item(), how)
        return self._text(tensor)

    def _is_constant(self, value: Any) -> bool:
        """Whether a tensor of whole numbers follows from nothing that changes."""
        if not isinstance(value, FakeTensor) or value.dtype not in (torch.int32, torch.int64):
            return False
        return self.reader.origin(self._ref(value)) is Origin.NOTHING

    def _select(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        found = self._at_one_place(*args) if name == INDEX and self.is_visiting else None
        return super()._select(name, args, kwargs) if found is None else found

    def _at_one_place(self, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
        """What stands where a number of the loop says, which is selected, and not looked up."""
        dims = [k for k, index in enumerate(indices) if index is not None]
        index = indices[dims[0]] if len(dims) == 1 else None
        is_one = index is not None and spec_of(index).shape in ((), (1,))
        if index is None or not is_one or not self._is_constant(index):
            return None
        with really():
            (place,) = self.reader.value(self._ref(index)).flatten().tolist()
        with self.fake_mode:
            found = x.new_empty((*x.shape[: dims[0]], *x.shape[dims[0] + 1 :]))
        ref = self._add(SELECT, (self._ref(x), dims[0], place), {}, (spec_of(found),))
        if index.dim():
            with self.fake_mode:
                found = found.unsqueeze(dims[0]).clone()
            ref = self._add(UNSQUEEZE, (ref, dims[0]), {}, (spec_of(found),))
        self.aliases.add(found, ref)
        return found

    def blame_loop(self, error: Exception) -> None:
        """Raises why a turn cannot be recorded, of which the error is none of those that a forward
        is recorded again for.
        """
        if self.is_visiting and not isinstance(error, AGAIN):
            source, _, why = str(error).partition(": ")
            if not isinstance(error, RecordError):
                source, why = "", f"a turn fails: {failure(error)}"
            raise self.hit_loops[-1].error(source, why.partition("; ")[0]) from error

    def skips(self) -> tuple[Skip, ...]:
        """What turns leave out where they were not hit. Raises where that may be read."""
        found: list[Skip] = []
        for loop in self.hit_loops:
            if not loop.whole:
                raise loop.error(loop.source, "a turn ends the loop")
            visits, outputs = loop.visits, self.outputs
            found += skips_of(self.inputs, self.nodes, self.sources, loop.hit, visits, outputs,
                              refuse=loop.error)  # fmt: skip
        return tuple(found)

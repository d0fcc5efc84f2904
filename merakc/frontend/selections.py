"""Rows and elements that a mask of the batch chooses, or the places where it is true.

Masks that are computed alike choose equally many, which is then one symbol: `z[y >= 0]` and
`y[y >= 0]` go together. A cross-entropy of chosen rows ignores the labels of all others instead,
which is the same, and is of one shape for all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from merakc.frontend.aliases import spec_of
from merakc.frontend.asking import RESHAPE, Asking
from merakc.frontend.calls.normalise import filled
from merakc.frontend.calls.places import counted, size_of_places
from merakc.frontend.values.reads import read_refs
from merakc.frontend.values.symbols import is_symbolic
from merakc.ir.graph import Ref, map_refs

NONZERO = "aten.nonzero.default"
INDEX = "aten.index.Tensor"
BINCOUNT = torch.ops.aten.bincount.default
PUT, PUT_ = torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default
# Calls that pass places on, of which there are as many behind them.
PASSED = frozenset(
    {RESHAPE, "aten.squeeze.default", "aten.squeeze.dim", "aten.unbind.int", "aten.select.int",
     "aten.detach.default"}
)  # fmt: skip
CROSS_ENTROPY = "aten.cross_entropy_loss.default"
LOSSES = (CROSS_ENTROPY, "aten.nll_loss_nd.default")
MEAN, SUM = 1, 2  # torch's numbers of reductions


@dataclass(frozen=True, slots=True)
class Selection:
    """What `mask` has chosen of `source`, and both values when it did."""

    source: Tensor
    mask: Tensor
    refs: tuple[Ref, Ref]
    form: Ref  # the first value that is computed as the mask is


class Selecting(Asking):  # type: ignore[no-untyped-call]
    """A graph that is written as calls pass, in which what known masks choose is known to be so."""

    _call: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forms_of: dict[str, str] = {}  # for each value, the first that is computed as it is
        self.calls: dict[str, str] = {}
        self.places_of: dict[Ref, Tensor] = {}  # of masks, by their form
        self.masks: dict[str, Tensor] = {}  # by the calls that give their places
        self.selected: dict[Ref, Selection] = {}

    def _select(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What a call gives that selects, or computes a loss of what was; else `NotImplemented`."""
        if name == NONZERO and self._is_known(args[0]):
            return self._nonzero(args[0])
        if name == "aten.masked_select.default" and self._is_known(args[1]):
            with self:
                return _chosen(*args)
        if name == "aten.index_select.default" and self._mask_of(args[2]) is not None:
            with self:
                return args[0][(slice(None),) * (args[1] % args[0].dim()) + (args[2],)]
        if name == INDEX and not self.settling:
            return self._indexed(*args)
        found: Any = NotImplemented
        if name in LOSSES and not self.settling:
            found = self._of_all(name, *args, **kwargs)
        if found is NotImplemented and name == CROSS_ENTROPY and is_symbolic(args):
            found = self._cross_entropy(*args, **kwargs)
        return found

    def _nonzero(self, mask: Tensor) -> Any:
        """The places of a mask."""
        form = self._form(self._ref(mask))
        if form not in self.places_of:
            found = self._call(torch.ops.aten.nonzero.default, (mask,), {})
            self.places_of[form] = found
            self.masks[self._ref(found).node] = mask
            return found
        known = self.places_of[form]
        with self.fake_mode:
            found = torch.empty(known.shape, dtype=known.dtype)
        self.aliases.add(found, self._ref(known))
        return found

    def _indexed(self, x: Tensor, indices: Sequence[Tensor | None]) -> Any:
        """A selection by known masks, as one by their places; noted if it is by one mask."""
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if masks and all(map(self._is_known, masks)):
            found: list[Tensor | None] = []
            with self:
                for index in indices:
                    is_mask = any(index is m for m in masks)
                    found += index.nonzero().unbind(1) if is_mask else [index]  # type: ignore[union-attr]
                out = torch.ops.aten.index.Tensor(x, found)
            mask = masks[0]
        else:
            (index,) = indices if len(indices) == 1 else (None,)
            chosen = self._mask_of(index)
            if chosen is None:
                return NotImplemented
            out, mask = self._call(torch.ops.aten.index.Tensor, (x, indices), {}), chosen
        if len(indices) == 1 and mask.dtype == torch.bool:
            refs = self._ref(x), self._ref(mask)
            self.selected[self._ref(out)] = Selection(x, mask, refs, self._form(refs[1]))
        return out

    def _put(self, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
        given = x, indices, values, accumulate
        found = self._filled(*given)
        return found if found is not None else self._call(PUT, given, {})

    def _put_(self, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
        given = x, indices, values, accumulate
        found = self._filled(*given)
        if found is None:
            return self._call(PUT_, given, {})
        with self:
            return x.copy_(found)

    def _filled(self, x: Tensor, indices: Any, values: Tensor, accumulate: bool) -> Tensor | None:
        """What a write by a mask makes of x, where the values have a gradient, which would be of a
        size that only the mask knows, and are the same at all places.
        """
        if self._ref(values) not in self.grads:
            return None
        with self:
            parts = filled(x, indices, values)
            if parts is None:
                return None
            mask, values = parts
            return torch.where(mask, x + values if accumulate else values, x)

    def _bincount(self, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        """How often each number is there: as many counts as `minlength` of places that are less."""
        inputs = {i.name: i for i in self.inputs}
        size = size_of_places(self._ref(x), {n.name: n for n in self.nodes}, inputs)
        if weights is not None or size is None or size > minlength or x.dim() != 1:
            given: Tensor = self._call(BINCOUNT, (x, weights, minlength), {})
            return given
        with self:
            return counted(x, minlength)

    def _mask_of(self, index: Tensor | None) -> Tensor | None:
        """The mask whose places an index holds, all of them in their order."""
        if index is None or index.dim() != 1 or not self._is_known(index):
            return None
        node = self.reader.maker_of(self._ref(index).node)
        while node is not None and node.op in PASSED:
            node = self.reader.maker_of(node.refs[0].node)
        mask = self.masks.get(node.name) if node is not None else None
        if node is None or mask is None or mask.dim() != 1:
            return None
        return mask if spec_of(index).shape == node.spec.shape[:1] else None

    def _of_all(
        self,
        name: str,
        scores: Tensor,
        labels: Tensor,
        weight: Tensor | None = None,
        reduction: int = MEAN,
        ignore_index: int = -100,
        *more: Any,
        **others: Any,
    ) -> Any:
        """The loss of chosen scores and labels, as one of all that ignores those of the others."""
        one, other = (self.selected.get(self._ref(x)) for x in (scores, labels))
        if one is None or other is None or one.form != other.form or reduction not in (MEAN, SUM):
            return NotImplemented
        if (one.source.dim() - 1, other.source.dim()) != (one.mask.dim(),) * 2:
            return NotImplemented
        if any((self._ref(s.source), self._ref(s.mask)) != s.refs for s in (one, other)):
            return NotImplemented  # written since
        with self:
            every = torch.where(one.mask, other.source, ignore_index).flatten()
            given = one.source.flatten(0, -2), every, weight, reduction, ignore_index, *more
            kind = torch.ops.aten.cross_entropy_loss
            return (kind if name == CROSS_ENTROPY else torch.ops.aten.nll_loss_nd)(*given, **others)

    def _cross_entropy(
        self,
        scores: Tensor,
        labels: Tensor,
        weight: Tensor | None = None,
        reduction: int = MEAN,
        *more: Any,
        **others: Any,
    ) -> Tensor:
        """One of which the values say the shape, which torch has wrong where it reduces nothing."""
        classes = 1 if scores.dim() > 1 else 0
        shape = () if reduction else (*scores.shape[:classes], *scores.shape[classes + 1 :])
        with self.fake_mode:
            out = scores.new_empty(shape)
        given = self._args((scores, labels, weight, reduction, *more))
        self.aliases.add(out, self._emit(CROSS_ENTROPY, given, self._args(others), (out,)))
        return out

    def _form(self, ref: Ref) -> Ref:
        """The first value that is computed as a known value is."""
        waiting = [ref.node]
        while waiting:
            name = waiting[-1]
            node = self.reader.maker_of(name)
            before = read_refs(node, self.sources) if node is not None else []
            unseen = [r.node for r in before if r.node not in self.forms_of]
            if name in self.forms_of or node is None:
                self.forms_of.setdefault(name, name)
            elif unseen:
                waiting += unseen
                continue
            else:
                alike = map_refs((node.args, node.kwargs), self._formed)
                self.forms_of[name] = self.calls.setdefault(f"{node.op} {alike!r}", name)
            waiting.pop()
        return self._formed(ref)

    def _formed(self, ref: Ref) -> Ref:
        return Ref(self.forms_of[ref.node], ref.index)


def _chosen(x: Tensor, mask: Tensor) -> Tensor:
    """`torch.masked_select`, as an index: rows where the mask is the same for all of a row."""
    dims = len(torch.broadcast_shapes(x.shape, mask.shape))  # type: ignore[no-untyped-call]
    x, mask = x[(None,) * (dims - x.dim())], mask[(None,) * (dims - mask.dim())]
    rows = dims
    while rows > 1 and mask.shape[rows - 1] == 1:
        rows -= 1
    lead = torch.broadcast_shapes(x.shape[:rows], mask.shape[:rows])  # type: ignore[no-untyped-call]
    mask = mask.flatten(rows - 1) if rows < dims else mask
    return x.expand(*lead, *x.shape[rows:])[mask.expand(lead)].flatten()

"""Which elements depend on those of one sample, seen as the calls of a function run.

Elements are marked. What a pointwise call makes of marked ones is marked, whatever their values; of
other calls, what changes where marked elements are other numbers. So a bound that no value exceeds,
`torch.where(x.max() > 1e4, ...)`, is seen as one that all do. Of the places where a mask is true
those are marked where the mask is: whether one is listed depends on it, but not which one it is.
What Python asks of marked elements may be answered otherwise, to see which elements that changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

ASKS, EQUAL = "aten._local_scalar_dense.default", "aten.equal.default"
LARGE = 1e4  # and finite in all dtypes
HUGE, MANY = 1e30, 10**4  # as answers; somebody may count to it
# By their names: what lists places, what reads by them, and what writes by them.
LISTS, READS, PUTS, ADDS, SCATTERS = (
    "nonzero", ("index", "_unsafe_index"),
    ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"),
    ("index_add", "index_add_"), ("scatter", "scatter_", "scatter_add", "scatter_add_"),
)  # fmt: skip


def otherwise(answer: Any) -> Iterator[Any]:
    """Other answers to a question of Python's."""
    if isinstance(answer, bool):
        yield not answer
    elif isinstance(answer, int):
        yield from (0, -1, answer + 1, MANY)
    elif isinstance(answer, float):
        yield from (0.0, 1.0, -HUGE, HUGE, math.nan)


class Dependence(TorchDispatchMode):
    """Follows marks while it is entered.

    `asked` are the answers of Python's questions, and whether of marked elements; `instead` has
    others to give, by the number of the question.
    """

    def __init__(self, instead: Mapping[int, Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: list[tuple[Any, bool]] = []
        self.instead = instead or {}
        # By memory, so that views have the marks of what they are views of; with the sizes of
        # elements, and a tensor that keeps the memory.
        self._marks: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._places: dict[int, Tensor] = {}  # by their memory

    def mark(self, x: Tensor, marked: Tensor) -> None:
        """Marks elements of a tensor; those that are not `marked` stay as they are."""
        if marked.any():
            key = x.untyped_storage()._cdata
            if key not in self._marks:
                count = x.untyped_storage().nbytes() // x.element_size()
                self._marks[key] = torch.zeros(count, dtype=torch.bool), x.element_size(), x
            own = self._of(x)
            if own is not None:
                own.logical_or_(marked)
            else:
                self._marks[key][0].fill_(True)

    def marked(self, x: Tensor) -> Tensor:
        """Which of its elements are marked."""
        if x.untyped_storage()._cdata not in self._marks:
            return torch.zeros(x.shape, dtype=torch.bool)
        own = self._of(x)
        return torch.ones(x.shape, dtype=torch.bool) if own is None else own.clone()

    def _of(self, x: Tensor) -> Tensor | None:
        """The marks of a tensor in memory that has some; None where elements are other ones."""
        marks, size, _ = self._marks[x.untyped_storage()._cdata]
        if size != x.element_size():
            return None
        return marks.as_strided(x.size(), x.stride(), x.storage_offset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, structure = pytree.tree_flatten((args, kwargs or {}))
        marks = {k: self.marked(x) for k, x in enumerate(given) if isinstance(x, Tensor)}
        marks = {k: m for k, m in marks.items() if m.any()}
        before = [x.clone() if k in marks else x for k, x in enumerate(given)]
        out = func(*args, **(kwargs or {}))
        if str(func) in (ASKS, EQUAL):
            self.asked.append((out, bool(marks)))
            return self.instead.get(len(self.asked) - 1, out)
        if not marks:
            return out
        memory = {x.untyped_storage()._cdata for x in given if isinstance(x, Tensor)}
        made = [
            x for x in pytree.tree_leaves(out)
            if isinstance(x, Tensor)
            and (func._schema.is_mutable or x.untyped_storage()._cdata not in memory)
        ]  # fmt: skip
        found = self._by_places(func._opname, args, out)
        if found is None and torch.Tag.pointwise in func.tags:
            found = [_any(list(marks.values()), x) for x in made]
            if all(self._lists_places(given[k]) for k in marks):
                self._places |= {x.untyped_storage()._cdata: x for x in made}
        elif found is None:
            found = self._changed(func, before, structure, marks, made)
        for x, own in zip(made, found, strict=True):
            self.mark(x, own)
        return out

    def _lists_places(self, x: Tensor) -> bool:
        return not x.is_floating_point() and x.untyped_storage()._cdata in self._places

    def _by_places(self, name: str, args: Sequence[Any], out: Any) -> list[Tensor] | None:
        """The marks of what a call makes of places, or lists, or reads by masks; None of others."""
        if name == LISTS:
            self._places[out.untyped_storage()._cdata] = out
            return [self.marked(args[0])[out.unbind(1)][:, None].expand(out.shape)]
        if name not in (*READS, *PUTS, *ADDS, *SCATTERS):
            return None
        by_dim = name not in (*READS, *PUTS)
        found = self._listed([args[2]] if by_dim else args[1])
        if found is None:
            return None
        indices, listed = found
        if name in READS:
            read = self.marked(args[0])[indices]
            return [read | _leading(listed, read)]
        target, values = self.marked(args[0]).float(), self.marked(args[3 if by_dim else 2])
        if not by_dim:
            put = values.expand(target[indices].shape) | _leading(listed, target[indices])
            return [target.index_put(indices, put.float(), accumulate=True) > 0]
        if name in ADDS:
            along = values.movedim(args[1], 0) if values.dim() else values
            put = (along | _leading(listed, along)).movedim(0, args[1])
            return [target.index_add(args[1], args[2], put.float()) > 0]
        put = listed | (values if values.dim() else values.expand(listed.shape))
        return [target.scatter_add(args[1], args[2], put.float()) > 0]

    def _listed(self, given: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """Indices as places, with the marks of any; None where other marked numbers are among them,
        or not all of the first dims have one.
        """
        indices: list[Tensor] = []
        marks: list[Tensor] = []
        for index in given:
            if index is None:
                return None
            own = self.marked(index)
            if index.dtype in (torch.bool, torch.uint8):
                places = index.nonzero().unbind(1)
                indices += places
                marks.append(own[places])
            elif own.any() and not self._lists_places(index):
                return None
            else:
                indices.append(index)
                marks.append(own)
        return tuple(indices), torch.stack(torch.broadcast_tensors(*marks)).any(0)  # type: ignore[no-untyped-call]

    def _changed(
        self, func: Any, given: Sequence[Any], structure: Any, marks: Mapping[int, Tensor],
        made: Sequence[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """Which elements of what a call has made are others where marked elements are."""
        plain = [x.clone() for x in made]
        found = [torch.zeros(x.shape, dtype=torch.bool) for x in made]
        tried = False
        for number in range(4):
            other = [
                _other(x, marks[k], number) if k in marks
                else x.clone() if isinstance(x, Tensor) and func._schema.is_mutable
                else x
                for k, x in enumerate(given)
            ]  # fmt: skip
            args, kwargs = pytree.tree_unflatten(other, structure)
            try:
                out = func(*args, **kwargs)
            except (RuntimeError, IndexError, ValueError):
                continue  # of places that there are not
            tried = True
            outs = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
            for k, (x, y) in enumerate(zip(plain, outs, strict=False)):
                found[k] |= _differ(x, y) if x.shape == y.shape else True
        return found if tried else [torch.ones_like(own) for own in found]


def _any(marks: Sequence[Tensor], like: Tensor) -> Tensor:
    """Where any of the marks is, as a tensor of this shape has it."""
    found = torch.zeros(like.shape, dtype=torch.bool)
    for own in marks:
        found |= own if own.dim() <= like.dim() else own.any()
    return found


def _leading(marks: Tensor, like: Tensor) -> Tensor:
    """Marks of the first dims of a tensor."""
    return marks.view(*marks.shape, *(1,) * (like.dim() - marks.dim()))


def _other(x: Tensor, marked: Tensor, number: int) -> Tensor:
    """Other numbers where a tensor is marked; whole ones are near those that stand in it, as places
    may have to be.
    """
    if x.dtype == torch.bool:
        values = (~x, x | True, x & False, x.roll(1))[number]
    elif x.is_floating_point() or x.is_complex():
        values = torch.full_like(x, (float("nan"), LARGE, -LARGE, 0.0)[number])
    else:
        least, most = x.new_full(x.shape, int(x.min())), x.new_full(x.shape, int(x.max()))
        values = (most, least, x + 1, x - 1)[number]
    return torch.where(marked, values, x)


def _differ(one: Tensor, two: Tensor) -> Tensor:
    if not (one.is_floating_point() or one.is_complex()):
        return one != two
    return ~torch.isclose(one, two, rtol=1e-4, atol=1e-6, equal_nan=True)

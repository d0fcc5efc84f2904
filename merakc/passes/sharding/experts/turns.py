"""One turn of a loop over experts: rows that a mask chooses, computed on, and written back.

A recording has a part of the forward whose shapes depend on a mask as one node, with the calls
inside (`merakc.frontend.regions`). A turn is such a part that reads tensors by the places of one
mask, computes on what it has read, and adds it to a tensor, or writes it there, in the rows that
one of the mask's dims names. Whether each row is computed by itself is not for here to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from merakc.frontend.regions import Region
from merakc.frontend.values.symbols import Number, numbers
from merakc.ir.graph import Node, Ref, TensorSpec, map_refs
from merakc.kernels.opaque import find
from merakc.passes.sharding.dims import given
from merakc.passes.sharding.experts.ends import GROUPED

NONZERO, INDEX, PUT = "aten.nonzero.default", "aten.index.Tensor", "aten.index_put.default"
RESHAPE = "aten.reshape.default"
ADD, ADDED = "aten.index_add.default", "aten.add.Tensor"
PASSING = ("aten.squeeze.default", "aten.squeeze.dim", "aten.reshape.default")


class NotATurnError(Exception):
    """Why a part of the forward is no turn: the line, and what it does."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"{source}: {why}")
        self.source, self.why = source, why


@dataclass(frozen=True, slots=True)
class Read:
    """Rows of a tensor, by the places of the mask along these of its dims; so many dims before
    these, of one element, are left out.
    """

    of: Ref
    along: tuple[int, ...]
    lead: int = 0


@dataclass(eq=False)
class Turn:
    """One turn, `node` of the graph, of the `calls` inside, in which the values of the graph have
    their names there.

    `reads` says what calls have read, `places` which values are places along which dim of the
    `mask`. The `made` rows are added to those of `target` (`adds`), or written there, that the
    places along the mask's dim `dim` name, `once` where an expert may have a row twice. `sizes`
    are the numbers of rows that are chosen. Where none is, a turn of what was `hit` is passed over.
    """

    node: Node
    specs: Mapping[Ref, TensorSpec]
    calls: list[Node] = field(default_factory=list)
    reads: dict[Ref, Read] = field(default_factory=dict)
    led: dict[Ref, tuple[Node, Read]] = field(default_factory=dict)
    places: dict[Ref, int | None] = field(default_factory=dict)
    rows: set[Ref] = field(default_factory=set)
    sizes: set[Number] = field(default_factory=set)
    mask: Ref | None = None
    given: Ref | None = None  # the mask that the calls read
    target: Ref | None = None
    made: Ref | None = None
    dim: int = 0
    adds: bool = True
    once: bool = False
    hit: bool = False
    end: str = ""  # the call that writes

    def over(self, mask: Ref, dims: Sequence[int]) -> None:
        """Takes the places of another mask, of which the mask's own dims are these, and which is
        true once at most where that is.
        """
        self.mask, self.dim = mask, dims[self.dim]
        self.reads = {
            ref: replace(read, along=tuple(dims[k] for k in read.along))
            for ref, read in self.reads.items()
        }

    def __post_init__(self) -> None:
        call = find(self.node.args[-1])
        region = call.forward
        if not isinstance(region, Region):
            raise NotATurnError(
                call.source, f"'{call.module}' runs as it is, since {call.reason}; if it is a "
                "loop over experts, let it run over all, whether or not they have rows"
            )  # fmt: skip
        names: dict[Ref, Ref] = dict(zip(region.inputs, self.node.args[0], strict=True))

        def now(ref: Ref) -> Ref:
            return names.get(ref, Ref(f"{self.node.name}/{ref.node}", ref.index))

        self.is_grouped = any(n.op == GROUPED for n in region.nodes)
        for node in region.nodes:
            args, kwargs = (map_refs(a, now) for a in (node.args, node.kwargs))
            self._add(node.reading(args, kwargs), f"{self.node.name}/{node.name}")
        if self.target is None or len(region.outputs) != 1 or self.mask is None:
            raise NotATurnError(call.source, "what a mask chooses is not written to rows once")
        if now(region.outputs[0]) != Ref(self.end):
            raise NotATurnError(call.source, "what is read of it is not what it writes to")
        hit = {now(skip.mask) for skip in region.skips.values()}
        self.hit = bool(hit)
        if self.hit and hit != {self.mask}:
            raise NotATurnError(call.source, "turns of two experts meet in one part")

    def _add(self, node: Node, name: str) -> None:
        read = [r for r in node.refs if r in self.places or r in self.rows]
        if self.target is not None:
            raise NotATurnError(node.source, "something is computed behind the write")
        if node.op == NONZERO:
            self._take_mask(node, node.args[0])
            self.places[Ref(name)] = None
            self.sizes.update(numbers(node.spec.shape))
        elif node.op == INDEX and not any(r in self.rows for r in node.refs):
            self._read(node, name)
        elif node.op == RESHAPE and node.refs[0] in self.led:
            self._read_flat(node, name)
        elif node.op in (ADD, PUT):
            self._write(node, name)
        elif read and all(r in self.places for r in read):
            self._pass_places(node, name)
        elif read and not any(r in self.places for r in read):
            self._add_rows(node, name)
        else:
            raise NotATurnError(node.source, f"{node.op} {self._reason(reads=bool(read))}")

    def _read(self, node: Node, name: str) -> None:
        indices, shape = node.args[1], self.specs.get(node.args[0], node.spec).shape
        lead = next((k for k, index in enumerate(indices) if index is not None), 0)
        if any(size != 1 for size in shape[:lead]):
            raise NotATurnError(node.source, "rows are read of several tensors in one")
        read = Read(node.args[0], self._along(node, indices[lead:]), lead)
        if lead:
            self.led[Ref(name)] = node, read
        else:
            self.reads[Ref(name)] = read
            self._add_rows(node, name)

    def _read_flat(self, node: Node, name: str) -> None:
        """Rows behind dims of one element, which are left out then."""
        index, self.reads[Ref(name)] = self.led[node.refs[0]]
        if node.spec.shape != index.spec.shape[self.reads[Ref(name)].lead :]:
            raise NotATurnError(node.source, "rows that were read are taken apart")
        self._add_rows(replace(index, outputs=node.outputs), name)

    def _reason(self, *, reads: bool) -> str:
        """Why a call is none of a turn, and what would be."""
        if reads:
            return "reads more than rows that a mask has chosen"
        if self.is_grouped:
            return (
                "gives as many elements as the data says: count the rows of experts by "
                "torch.bincount(ids, minlength=experts), of ids that topk or argmax has chosen"
            )
        return "gives something else than rows that a mask chooses"

    def _take_mask(self, node: Node, mask: Ref) -> None:
        if mask not in self.specs or self.mask not in (None, mask):
            raise NotATurnError(node.source, "several masks choose its rows")
        self.mask = self.given = mask

    def _is_mask(self, value: Any) -> bool:
        spec = self.specs.get(value) if isinstance(value, Ref) else None
        return spec is not None and spec.dtype in (torch.bool, torch.uint8)

    def _add_rows(self, node: Node, name: str) -> None:
        """A call that makes rows, as many as are chosen."""
        for spec in node.outputs:
            shape: tuple[Any, ...] = spec.shape if spec is not None else ()
            if not isinstance(next(iter(shape), None), Number) or [*numbers(shape[1:])]:
                raise NotATurnError(node.source, f"{node.op} gives no row for each that is chosen")
            if node.op == INDEX:
                self.sizes.add(shape[0])
        if not set(numbers((node.args, node.kwargs, self._shapes(node)))) <= self.sizes:
            raise NotATurnError(node.source, f"{node.op} computes with how many rows there are")
        self.calls.append(replace(node, name=name))
        self.rows.update(Ref(name, k) for k, o in enumerate(node.outputs) if o is not None)

    @staticmethod
    def _shapes(node: Node) -> tuple[Any, ...]:
        return tuple(o.shape for o in node.outputs if o is not None)

    def _pass_places(self, node: Node, name: str) -> None:
        """The places along one dim of the mask, of those along all."""
        ref = node.refs[0]
        if self.places[ref] is not None or len(node.refs) > 1:
            raise NotATurnError(node.source, f"{node.op} computes with the places of a mask")
        assert self.mask is not None
        dims = len(self.specs[self.mask].shape)
        if node.op == "aten.unbind.int" and given(node, "dim") in (1, -1):
            self.places |= {Ref(name, k): k for k in range(dims)}
        elif node.op == "aten.select.int" and given(node, "dim") in (1, -1):
            self.places[Ref(name)] = given(node, "index") % dims
        elif node.op in PASSING and dims == 1 and len(node.spec.shape) == 1:
            self.places[Ref(name)] = 0
        else:
            raise NotATurnError(node.source, f"{node.op} computes with the places of a mask")

    def _along(self, node: Node, indices: Sequence[Any]) -> tuple[int, ...]:
        """The dims of the mask by whose places a tensor is read, or written to."""
        found: list[int] = []
        for index in indices:
            along = self.places.get(index) if isinstance(index, Ref) else None
            if along is not None:
                found.append(along)
            elif len(indices) == 1 and self._is_mask(index):
                self._take_mask(node, index)
                found += range(len(self.specs[index].shape))
            else:
                raise NotATurnError(node.source, "a tensor is read by more than places of a mask")
        if not isinstance(node.args[0], Ref) or node.args[0] not in self.specs:
            raise NotATurnError(node.source, "what is read is made of rows that are chosen")
        return tuple(found)

    def _write(self, node: Node, name: str) -> None:
        if node.op == ADD:
            target, made = given(node, "self"), given(node, "source")
            self.adds, good = True, given(node, "dim") == 0 and given(node, "alpha") == 1
            along = self._along(node, (given(node, "index"),))
        else:
            target, indices, made = node.args[:3]
            self.adds, good = bool(given(node, "accumulate")), True
            along = self._along(node, indices)
        assert self.mask is not None
        if not good or len(along) != 1 or made not in self.rows:
            raise NotATurnError(node.source, f"{node.op} writes to more than rows of a tensor")
        if not self.adds and (sum_ := self._sum(made, Read(target, along))) is not None:
            made, self.adds = sum_, True
        if node.op == PUT and not given(node, "accumulate"):
            self.once = len(self.specs[self.mask].shape) > 1
        if self.once and not self.adds:
            raise NotATurnError(node.source, "a row of two experts is what the last one writes")
        self.target, self.made, self.dim, self.end = target, made, along[0], name

    def _sum(self, made: Ref, old: Read) -> Ref | None:
        """What is added to the rows as they were, in `out[places] += made`."""
        maker = next(n for n in self.calls if n.name == made.node)
        if maker.op != ADDED or given(maker, "alpha") != 1 or len(maker.refs) != 2:
            return None
        one, other = maker.args[:2]
        if self.reads.get(one) != old:
            one, other = other, one
        assert isinstance(one, Ref)
        users = [n for n in self.calls if one in n.refs]
        if self.reads.get(one) != old or other not in self.rows or users != [maker]:
            return None
        self.calls = [n for n in self.calls if n is not maker and n.name != one.node]
        del self.reads[one]
        found: Ref = other
        return found

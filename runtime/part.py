"""A rank's part of a named tensor, as `state_dict()` gives it.

It has the shape of the whole tensor, as a DTensor has, but knows parts that DTensor cannot say:
packed projections, uneven blocks, and the pieces of buckets that are optimized on different ranks.
torch's distributed checkpoint asks it what to write and where to read (`__create_write_items__`,
`__create_chunk_list__`, `__get_tensor_shard__`). It can be copied, moved and pickled, and
computed with element by element, with numbers and parts of just the same elements: whatever would
take a part for the whole is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Never

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils.weak import WeakIdKeyDictionary

from merakc.errors import ConfigError
from merakc.ir.boxes import Box, part_boxes
from merakc.ir.layout import Layout, parse_layout


@dataclass(frozen=True)
class Place:
    """Which elements of the tensor `name` a rank has: those from `start` to `stop`, in row-major
    order, of tp rank `tp_rank`'s part by `layout`. Of equal ones one rank `writes`.
    """

    name: str
    layout: Layout
    tp: int
    tp_rank: int
    start: int
    stop: int
    writes: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole tensor."""
        return self.layout.shape

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the tensor."""
        return not self.layout.is_split and self.numel == self.layout.numel

    @property
    def elements(self) -> tuple[Layout, int, int, int, int]:
        """Which they are, of any tensor of that shape."""
        return self.layout, self.tp, self.tp_rank, self.start, self.stop

    @property
    def numel(self) -> int:
        """The elements of the part."""
        return self.stop - self.start

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of the whole tensor that it fills."""
        return _boxes(self.layout, self.tp, self.tp_rank, self.start, self.stop)

    def view(self, part: torch.Tensor, box: Box) -> torch.Tensor:
        """A box in the memory of the part; contiguous parts only."""
        shape = self.layout.local_shape(self.tp, self.tp_rank)
        strides = torch.empty(shape, device="meta").stride()
        first = sum(a * n for a, n in zip(box.local_starts, strides, strict=True)) - self.start
        return part.as_strided(box.sizes, strides, part.storage_offset() + first)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor, flat."""
        local = self.layout.take(whole, self.tp, self.tp_rank) if self.layout.is_split else whole
        return local.reshape(-1)[self.start : self.stop]


@cache
def _boxes(layout: Layout, tp: int, tp_rank: int, start: int, stop: int) -> tuple[Box, ...]:
    return part_boxes(layout, tp, tp_rank, start, stop)


class OfAWhole:
    """A tensor that is what this rank has of another, for which it speaks."""

    __slots__ = ()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, as what this rank holds: of no type that speaks for the whole."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class Handles(dict[str, torch.Tensor]):
    """A rank's parameters and buffers as graphs take them, apart from autograd, made when asked."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.state = state

    def __missing__(self, name: str) -> torch.Tensor:
        """The tensor of this name."""
        self[name] = found = plain(self.state[name]).detach()
        return found


places: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # of the parameters and buffers of living models


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where a parameter or buffer of a parallel model belongs; None where it is whole everywhere,
    and for every other tensor.
    """
    found: Place | None = places.get(tensor)  # type: ignore[no-untyped-call]
    return found


def _refusal(act: str, part: Place) -> ConfigError:
    return ConfigError(
        f"{act} a part of '{part.name}', of which this rank holds "
        f"{part.numel} of {part.layout.numel} elements: a part of a state_dict() can be "
        "saved (merakc.save, torch.distributed.checkpoint), loaded by the same rank of the "
        "same plan, and combined element by element, as averages are, with the same part and "
        "numbers; model.full_state_dict() gives whole tensors, part.to_local() this rank's"
    )


class TensorPart(torch.Tensor):
    """The part `local` of a tensor, of that place. See the module's text."""

    local: torch.Tensor
    place: Place
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[TensorPart], local: torch.Tensor, place: Place) -> TensorPart:
        """A part that shares the memory of `local`."""
        local = plain(local)
        made: TensorPart = torch.Tensor._make_wrapper_subclass(
            cls, place.shape, dtype=local.dtype, device=local.device
        )
        made.local, made.place = local, place
        return made

    def to_local(self) -> torch.Tensor:
        """The elements that this rank has, in the shape of its parameter."""
        return self.local

    def storage(self) -> Never:
        """Refused, as safetensors would write it for the whole."""
        raise _refusal("this takes the memory of", self.place)

    untyped_storage = storage

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TensorPart({self.place.name!r}, {self.place.numel} of {tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        p = self.place
        text = str(p.layout)
        return rebuild, (self.local, p.name, text, p.tp, p.tp_rank, p.start, p.stop, p.writes)

    def __deepcopy__(self, memo: Any) -> TensorPart:
        return TensorPart(self.local.detach().clone(), self.place)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Copies, moves, computes element by element; refuses everything else."""
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        first = args[0]
        if name in _COPIES and isinstance(first, cls):
            return cls(func(first.local, *args[1:], **kwargs), first.place)
        if name in _FILLED and isinstance(first, cls):
            kwargs.pop("memory_format", None)
            return cls(func(first.local, *args[1:], **kwargs), first.place)
        if name == "new_empty" and isinstance(first, cls) and tuple(args[1]) == tuple(first.shape):
            return cls(func(first.local, first.local.shape, **kwargs), first.place)
        if name in _PAIRS and all(isinstance(a, cls) for a in args[:2]):
            _check_same(first.place, args[1].place)
            found = func(first.local, args[1].local, *args[2:], **kwargs)
            return first if name == "copy_" else found
        leaves = pytree.tree_leaves((args, kwargs))
        part = next(a.place for a in leaves if isinstance(a, cls))
        writes = func._schema.is_mutable
        into = isinstance(first, cls) and name.endswith("_")
        if _is_pointwise(func) and _are_alike(leaves) and (into or not writes):
            for other in (a.place for a in leaves if isinstance(a, cls)):
                _check_same(part, other)
            local = pytree.tree_map_only(cls, lambda t: t.local, (tuple(args), kwargs))
            found = func(*local[0], **local[1])
            return first if writes else cls(found, part)
        raise _refusal(f"torch.{name} is called on", part)

    def numpy(self, **_: Any) -> Never:
        """Refuses: there are not all elements."""
        raise _refusal("all elements are read of", self.place)

    __array__ = tolist = numpy  # type: ignore[assignment]

    # ---- what torch.distributed.checkpoint asks

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """What this rank writes of the tensor."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(box.starts)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.shape),
            )
            for box in (self.place.boxes if self.place.writes else ())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank reads of it."""
        return [_chunk(box) for box in self.place.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of one of its boxes."""
        for box in self.place.boxes:
            if torch.Size(box.starts) == index.offset:
                return self.place.view(self.local, box)
        raise ConfigError(f"'{self.place.name}' has no box at {index.offset} on this rank")


_COPIES = ("detach", "clone", "_to_copy", "alias", "_pin_memory", "contiguous")
_FILLED = ("empty_like", "zeros_like")
_PAIRS = ("copy_", "equal")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.starts), torch.Size(box.sizes))


@cache
def _is_pointwise(func: Any) -> bool:
    """Whether an op computes every element of the same elements alone."""
    return torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags


def _are_alike(leaves: Sequence[Any]) -> bool:
    """Whether all tensors are parts whose elements lie alike, or numbers."""
    parts = [leaf for leaf in leaves if isinstance(leaf, TensorPart)]
    whole = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return len({p.local.shape for p in parts}) == 1 and len(whole) == len(parts)


def _check_same(own: Place, other: Place) -> None:
    if own.elements == other.elements:
        return
    if own.name != other.name:
        raise ConfigError(
            f"a part of '{other.name}' is copied into or combined with a part of '{own.name}', of "
            "which this rank holds other elements; model.full_state_dict() gives whole tensors on "
            "rank 0, and load_state_dict takes them"
        )
    raise ConfigError(
        f"a part of '{other.name}' is copied into or combined with another part of it: it was "
        "saved by another rank or under another plan; merakc.load and torch.distributed.checkpoint "
        "bring a state to any plan"
    )


def rebuild(
    local: torch.Tensor, name: str, layout: str, tp: int, rank: int, start: int, stop: int,
    writes: bool,
) -> TensorPart:  # fmt: skip
    """A part from what its pickle holds."""
    return TensorPart(
        local,
        Place(name, parse_layout(layout), tp, tp_rank=rank, start=start, stop=stop, writes=writes),
    )


torch.serialization.add_safe_globals([rebuild])


def tagged(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for a parameter or buffer in a state dict."""
    place, own = place_of(tensor), plain(tensor).detach()
    return own if place is None else TensorPart(own, place)


def local_of(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """What a parameter or buffer takes from a given tensor: a whole one or the same part.

    Raises `ConfigError` for the part of another rank or plan, and for other shapes.
    """
    place, own = place_of(own), plain(own)
    if isinstance(given, TensorPart):
        if place is None:
            raise ConfigError(
                f"'{given.place.name}' is given in parts, and this rank holds all of it: it was "
                "saved under another plan; merakc.load brings a state to any plan"
            )
        _check_same(place, given.place)
        return given.local
    if place is None:
        return given
    if tuple(given.shape) != place.shape:
        raise ConfigError(
            f"'{place.name}' is given as {tuple(given.shape)}, and the whole is {place.shape}"
        )
    return place.take(given.to(own.device)).view(own.shape)

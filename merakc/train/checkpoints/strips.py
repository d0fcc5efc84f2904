"""Tensors whose parts lie apart in a file, as columns do: the ranks that hold them bring them
together, so that each writes strips that lie in one piece.

Written by each rank where it belongs, a column is thousands of short runs, and all ranks write the
same pages of the file, one after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise, product
from typing import Any

import torch
import torch.distributed as dist

from merakc.files.elements import bytes_of

LEAST_RUN_BYTES = 1 << 20  # longer ones are written where they belong
STRIP_BYTES = 4 << 20
Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it starts in its tensor, and its sizes


@dataclass(frozen=True)
class Held:
    """A tensor of a save, and the boxes of it that ranks hold, which together are all of it."""

    shape: tuple[int, ...]
    itemsize: int
    boxes: list[tuple[int, Box]]

    def is_apart(self) -> bool:
        """Whether a box is many short runs in the file."""
        found = (_runs(sizes, self.shape) for _, (_, sizes) in self.boxes)
        return any(math.prod(n) > 1 and k * self.itemsize < LEAST_RUN_BYTES for n, k in found)


@dataclass(frozen=True)
class Strip:
    """Part of a tensor that lies in one piece in its file, and is written by one rank."""

    number: int
    name: str
    itemsize: int
    box: Box
    at_byte: int  # of the tensor's
    owner: int
    turn: int  # in which its messages are sent
    pieces: tuple[tuple[int, Box, Box], ...]  # rank, its box of the tensor, what is meant of that

    def of(self, rank: int) -> list[tuple[Box, Box]]:
        """What a rank holds of it: parts of boxes."""
        return [(box, part) for holder, box, part in self.pieces if holder == rank]

    def ranks(self) -> set[int]:
        """Those that hold something of it; its owner is one of them."""
        return {rank for rank, _, _ in self.pieces}


def _runs(sizes: Sequence[int], shape: Sequence[int]) -> tuple[Sequence[int], int]:
    """How many runs a box of a tensor is in its file, along each of its first dims, and the
    elements of one.
    """
    inner = max(0, len(shape) - 1)  # from this dim on all lies behind each other
    while inner > 0 and sizes[inner] == shape[inner]:
        inner -= 1
    return sizes[:inner], math.prod(sizes[inner:])


def runs_of(
    data: torch.Tensor, box: Box, shape: Sequence[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """The bytes of a box of a tensor that lie behind each other in its file, and where in the
    tensor's bytes they begin.
    """
    if not data.numel():
        return
    counts, _ = _runs(box[1], shape)
    size = data.element_size()
    strides = [n * size for n in torch.empty(tuple(shape), device="meta").stride()]
    first = sum(a * n for a, n in zip(box[0], strides, strict=True))
    rows = bytes_of(data).view(math.prod(counts), -1)
    for place, row in zip(product(*map(range, counts)), rows, strict=True):
        yield first + sum(i * n for i, n in zip(place, strides, strict=False)), row


def strips_of(tensors: Mapping[str, Held]) -> list[Strip]:
    """Shares out tensors so that all ranks that hold them write as many bytes."""
    found: list[Strip] = []
    owned_bytes: Counter[int] = Counter()
    for name, held in tensors.items():
        at_byte = 0
        for strip in _cut(held.shape, held.itemsize):
            met = ((rank, box, _common(box, strip)) for rank, box in held.boxes)
            pieces = tuple((rank, box, part) for rank, box, part in met if part is not None)
            owner = min((rank for rank, _, _ in pieces), key=lambda r: (owned_bytes[r], r))
            turn = owned_bytes[owner] // STRIP_BYTES
            found.append(
                Strip(len(found), name, held.itemsize, strip, at_byte, owner, turn, pieces)
            )
            size_bytes = math.prod(strip[1]) * held.itemsize
            owned_bytes[owner] += size_bytes
            at_byte += size_bytes
    return found


def _cut(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """A tensor in row-major order, in boxes without gaps of at most `STRIP_BYTES`."""
    row_bytes = itemsize * math.prod(shape[1:])
    if row_bytes > STRIP_BYTES:
        for row in range(shape[0]):
            for starts, sizes in _cut(shape[1:], itemsize):
                yield (row, *starts), (1, *sizes)
        return
    bounds = range(0, shape[0], STRIP_BYTES // row_bytes)
    for first, last in pairwise((*bounds, shape[0])):
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])


def _common(one: Box, other: Box) -> Box | None:
    starts = tuple(map(max, one[0], other[0]))
    ends = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    sizes = tuple(e - s for e, s in zip(ends, starts, strict=True))
    return (starts, sizes) if min(sizes) > 0 else None


def _within(data: torch.Tensor, part: Box, start: Sequence[int]) -> torch.Tensor:
    """A part of what begins at `start`."""
    return data[tuple(slice(a - s, a - s + n) for a, n, s in zip(*part, start, strict=True))]


def bring_together(
    strips: Sequence[Strip],
    box_of: Callable[[str, Box], torch.Tensor],
    group: dist.ProcessGroup | None,
    write: Callable[[Strip, torch.Tensor], None],
) -> None:
    """Calls `write` with each strip that this rank owns, as bytes. `strips` are those that it has
    to do with, of one list of all ranks of the job; `box_of` gives its boxes in host memory, each
    once.

    What fails on this rank is raised at the end: until then the others wait for what it holds.
    """
    meeting = _Meeting(strips, box_of, group, write)
    ordered = sorted(strips, key=lambda strip: (strip.turn, strip.number))
    ends: list[Callable[[], None]] = []
    for _, turn in groupby(ordered, key=lambda strip: strip.turn):
        ends.append(meeting.begin(list(turn)))
        if len(ends) > 1:  # writes while the next messages are on their way
            ends.pop(0)()
    for end in ends:
        end()
    if meeting.failed:
        raise meeting.failed[0]


class _Meeting:
    """The messages of one rank."""

    def __init__(
        self,
        strips: Sequence[Strip],
        box_of: Callable[[str, Box], torch.Tensor],
        group: dist.ProcessGroup | None,
        write: Callable[[Strip, torch.Tensor], None],
    ) -> None:
        self.rank = dist.get_rank(group) if group is not None else 0
        self.box_of, self.group, self.write = box_of, group, write
        self.uses = Counter((s.name, box) for s in strips for box, _ in s.of(self.rank))
        self.boxes: dict[tuple[str, Box], torch.Tensor] = {}  # those of which more will be used
        self.failed: list[Exception] = []

    def begin(self, turn: list[Strip]) -> Callable[[], None]:
        """Starts the messages of a turn; what it gives waits for them, and writes."""
        works: list[tuple[Any, torch.Tensor]] = []
        own: list[tuple[Strip, dict[int, torch.Tensor]]] = []
        for strip in turn:
            if strip.owner != self.rank:
                data = torch.cat([part.reshape(-1) for part in self._parts(strip)])
                works.append((dist.isend(data, strip.owner, self.group, strip.number), data))
                continue
            came: dict[int, torch.Tensor] = {}
            for rank in strip.ranks() - {self.rank}:
                count = sum(math.prod(sizes) for _, (_, sizes) in strip.of(rank))
                came[rank] = torch.empty(count * strip.itemsize, dtype=torch.uint8)
                work = dist.irecv(came[rank], rank, self.group, strip.number)
                works.append((work, came[rank]))
            own.append((strip, came))
        return partial(self._end, works, own)

    def _end(
        self,
        works: list[tuple[Any, torch.Tensor]],
        own: list[tuple[Strip, dict[int, torch.Tensor]]],
    ) -> None:
        for work, _ in works:
            work.wait()
        for strip, came in own:
            whole = torch.empty((*strip.box[1], strip.itemsize), dtype=torch.uint8)
            for (_, part), data in zip(strip.of(self.rank), self._parts(strip), strict=True):
                _within(whole, part, strip.box[0]).copy_(data)
            for rank, message in came.items():
                at = 0
                for _, part in strip.of(rank):
                    to = _within(whole, part, strip.box[0])
                    to.copy_(message[at : at + to.numel()].view(to.shape))
                    at += to.numel()
            try:
                self.write(strip, whole.reshape(-1))
            except Exception as error:
                self.failed.append(error)

    def _parts(self, strip: Strip) -> list[torch.Tensor]:
        """What this rank holds of a strip, as bytes; zeros for what it cannot give."""
        found = []
        for box, part in strip.of(self.rank):
            key = strip.name, box
            self.uses[key] -= 1
            try:
                if key not in self.boxes:
                    self.boxes[key] = bytes_of(self.box_of(*key)).view(*box[1], -1)
                found.append(_within(self.boxes[key], part, box[0]))
                if not self.uses[key]:
                    del self.boxes[key]
            except Exception as error:
                self.failed.append(error)
                found.append(torch.zeros((*part[1], strip.itemsize), dtype=torch.uint8))
        return found

"""What a rank keeps of the weights as they come, and whether all ranks were given the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from merakc.files.elements import bytes_of
from merakc.ir.boxes import Box
from merakc.ir.layout import whole_layout
from merakc.runtime.groups import Groups, together
from merakc.runtime.part import Place, place_of
from merakc.runtime.state import Placement
from merakc.train.parameters.mapped import let_go

Part = tuple[int, int, int]  # of a tensor: its tp rank, and the first and last of its elements
Read = Callable[[Box], Iterator[torch.Tensor]]  # the next rows of a box of a tensor
Digests = dict[tuple[str, Part], str]
ROWS_BYTES = 1 << 24


class Parts:
    """Copies into `state` this rank's parts of tensors, and takes the SHA-256 of what it copies.

    So that nothing that any rank uses goes uncompared, each part is looked at by one rank more than
    have it: every rank hashes its own, and its share of the whole model. Every rank must make it.
    """

    def __init__(
        self, state: Mapping[str, torch.Tensor], placements: Mapping[str, Placement], groups: Groups
    ) -> None:
        self.state, self.taken = state, set[str]()
        self.digests: Digests = {}
        self.own = {
            name: place_of(t) or Place(name, whole_layout(t.shape), 1, 0, 0, t.numel())
            for name, t in state.items()
        }
        self.others: dict[str, list[Place]] = {}
        self.is_alone = groups.mesh.world_size == 1
        if not self.is_alone:
            everyone = together(lambda: {name: _part(p) for name, p in self.own.items()})
            for name, (tp_rank, start, stop) in _assigned(everyone, groups.rank):
                layout, tp = placements[name].layout, placements[name].sharers(groups.mesh).tp
                place = Place(name, layout, tp, tp_rank, start, stop, writes=False)
                self.others.setdefault(name, []).append(place)

    def put(self, name: str, read: Read) -> None:
        """Takes this rank's part of a tensor, and hashes it."""
        if name in self.own:
            self._copied(name, read, is_hashed=not self.is_alone)
        self._look(name, read, self.others.get(name, ()))

    def put_whole(self, name: str, tensor: torch.Tensor) -> None:
        """Takes this rank's part of a tensor that is there, and hashes it."""
        self.put(name, lambda box: rows_of(tensor, box))

    def compare(self, name: str, tensor: torch.Tensor) -> None:
        """Hashes this rank's part of a tensor that is there, and takes nothing."""
        own = [self.own[name]] if name in self.own and not self.is_alone else []
        self._look(name, lambda box: rows_of(tensor, box), [*own, *self.others.get(name, ())])

    def _copied(self, name: str, read: Read, *, is_hashed: bool) -> None:
        place, found = self.own[name], hashlib.sha256()
        part = self.state[name].detach()
        for box in place.boxes:
            target, at = place.view(part, box), 0
            for rows in read(box):
                count = len(rows) if rows.dim() else 1
                (target[at : at + count] if rows.dim() else target).copy_(rows)
                at += count
                if is_hashed:
                    found.update(_bytes(rows))
        self.taken.add(name)
        if is_hashed:
            self.digests[name, _part(place)] = found.hexdigest()

    def _look(self, name: str, read: Read, places: Sequence[Place]) -> None:
        for place in places:
            found = hashlib.sha256()
            for box in place.boxes:
                for rows in read(box):
                    found.update(_bytes(rows))
            self.digests[name, _part(place)] = found.hexdigest()


def unlike(everyone: Sequence[Digests]) -> str:
    """What ranks have otherwise than others, in words; empty where all agree."""
    first: dict[tuple[str, Part], tuple[int, str]] = {}
    found: dict[str, str] = {}
    for rank, digests in enumerate(everyone):
        for key, digest in digests.items():
            other, wanted = first.setdefault(key, (rank, digest))
            if digest != wanted:
                found.setdefault(key[0], f"'{key[0]}' of rank {rank} is not as rank {other}'s")
    more = f", and {len(found) - 1} tensors more" if len(found) > 1 else ""
    return next(iter(found.values())) + more if found else ""


def _assigned(everyone: Sequence[Mapping[str, Part]], rank: int) -> list[tuple[str, Part]]:
    """The parts that a rank hashes for others: of ranks that do not have a part anyway, always the
    one with the least to do.
    """
    holders: dict[tuple[str, Part], set[int]] = {}
    for number, own in enumerate(everyone):
        for name, part in own.items():
            holders.setdefault((name, part), set()).add(number)
    loads, found = [0] * len(everyone), []
    for (name, part), held in holders.items():
        free = [number for number in range(len(everyone)) if number not in held]
        if free:
            chosen = min(free, key=lambda number: loads[number])
            loads[chosen] += part[2] - part[1]
            if chosen == rank:
                found.append((name, part))
    return found


def _part(place: Place) -> Part:
    return place.layout.holder(place.tp_rank), place.start, place.stop


def rows_of(tensor: torch.Tensor, box: Box) -> Iterator[torch.Tensor]:
    """A box of a tensor as its next rows, of a bounded size. Of a mapped file no more than that
    stays in memory.
    """
    if not box.sizes:
        yield tensor
        return
    inner = tuple(slice(a, a + n) for a, n in zip(box.starts[1:], box.sizes[1:], strict=True))
    row_bytes = torch.Size(box.sizes[1:]).numel() * tensor.element_size()
    first, last = box.starts[0], box.starts[0] + box.sizes[0]
    many = max(1, ROWS_BYTES // max(1, row_bytes))
    for at in range(first, last, many):
        rows = tensor[(slice(at, min(at + many, last)), *inner)]
        yield rows
        let_go(rows)


def _bytes(rows: torch.Tensor) -> memoryview:
    return memoryview(bytes_of(rows).numpy())  # type: ignore[arg-type]

"""Optimizers that need whole tensors, on ranks that hold parts of them.

Within a step each tensor that ranks hold parts of is whole on one of them: its owner, which alone
updates it and keeps its state, of the whole's shape. Before the step parts of values and gradients
go to owners, behind it values come back, over the shards of dp and over tp, all tensors together.
Owners are dealt out by the arithmetic of products of their matrices, the most first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from merakc.ir.layout import Layout
from merakc.runtime.groups import Groups
from merakc.runtime.health.job import call
from merakc.runtime.part import Place, place_of, plain
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.shards import Bucket
from merakc.train.parameters.norms import kept_by_its_model
from merakc.train.parameters.places import elsewhere
from merakc.train.parameters.stepping import is_closure

CALL = "an optimizer's step on whole tensors"
# Of whole tensors that travel at once. Buffers of this size are taken of memory that others have
# left, where larger ones are pages anew each time, which cost more than what is copied into them.
TRAVEL_BYTES = 2**24
Pieces = list[list[torch.Tensor]]  # by rank of a group


class Home:
    """Where a rank's model holds its parameters."""

    def __init__(self, groups: Groups, sharded: ShardedState | None) -> None:
        self.groups, self.sharded = groups, kept_by_its_model(sharded)

    def bucket(self, name: str) -> Bucket | None:
        """The bucket whose shards are parts of a parameter, if there is one."""
        sharded = self.sharded()
        found = sharded.bucket_of.get(name) if sharded else None
        return found if found is not None and found.groups.block is not None else None


class Shared:
    """A parameter of which this rank and others of its model hold parts.

    `owner` is a rank of the shards' group, and one of tp.
    """

    def __init__(self, parameter: nn.Parameter, place: Place, home: Home) -> None:
        self.parameter, self.home = parameter, home
        self.name, self.layout = place.name, place.layout
        self.tp, self.tp_rank = place.tp, place.tp_rank  # its parts, and which this rank has
        self.bucket = home.bucket(place.name)
        self.block = self.bucket.groups.block if self.bucket else None
        self.whole = nn.Parameter(parameter.detach().new_empty(0))
        self.owner = (0, 0)

    @property
    def here(self) -> tuple[int, int]:
        """This rank, as owners are told."""
        shard = dist.get_rank(self.block) if self.block else 0
        return shard, self.tp_rank if self.layout.is_split else 0

    @property
    def is_owned(self) -> bool:
        """Whether this rank updates it."""
        return self.owner == self.here

    def local_shape(self, tp_rank: int) -> tuple[int, ...]:
        """What one rank of tp has of it."""
        return self.layout.local_shape(self.tp, tp_rank)

    def place_in_bucket(self, shard: int) -> int:
        """Where the shard of a rank of the group stands among all."""
        return self.bucket.groups.index_of(shard) if self.bucket else 0

    def bounds(self, shard: int) -> tuple[int, int]:
        """The elements of what a rank of tp has that stand in the shard of a rank of the group."""
        if self.bucket is None:
            return 0, torch.Size(self.local_shape(self.tp_rank)).numel()
        return self.bucket.bounds(self.name, self.place_in_bucket(shard))


Others = Mapping[torch.Tensor, nn.Parameter | None]
Lists = list[tuple[list[torch.Tensor], list[torch.Tensor]]]  # of parameter groups: now, before


def exchange(optimizer: Optimizer, others: Others) -> Lists:
    """Puts others into an optimizer's lists of parameters, and those that it wraps have, or takes
    some out, with the state that it has of them; returns what was in the lists.
    """
    every = with_wrapped(optimizer)
    lists = [group["params"] for one in every for group in one.param_groups]
    own = [(now, [*now]) for now in {id(now): now for now in lists}.values()]
    for now, before in own:
        given = (others.get(p, p) for p in before)
        now[:] = [p for p in given if p is not None]
    _rename(every, {p: q for p, q in others.items() if q is not None})
    return own


def exchange_back(optimizer: Optimizer, others: Others, own: Lists) -> None:
    """Fills its lists as they were, with the state of the others."""
    for now, before in own:
        now[:] = before
    _rename(with_wrapped(optimizer), {q: p for p, q in others.items() if q is not None})


def with_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, and those that it wraps."""
    inner = (x for x in vars(optimizer).values() if isinstance(x, Optimizer))
    return [optimizer, *(one for x in inner for one in with_wrapped(x))]


def _rename(every: list[Optimizer], names: Mapping[torch.Tensor, torch.Tensor]) -> None:
    for state in {id(one.state): one.state for one in every}.values():
        for old, new in names.items():
            if old is not new and old in state:
                state[new] = state.pop(old)


class Bringing:
    """Brings an optimizer other tensors than a rank's own parameters in its steps, `others`: before
    a step, and again behind whatever it calls back, which sees the parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.others: dict[torch.Tensor, nn.Parameter | None] = {}
        self.lists: Lists | None = None  # the optimizer's own, in a step
        self.within = 0  # steps of its class's bases, which its own calls
        before = optimizer.register_step_pre_hook(self._begin)
        behind = optimizer.register_step_post_hook(self._end)
        self.hooks = before, behind
        optimizer._optimizer_step_post_hooks.move_to_end(behind.id, last=False)  # type: ignore[attr-defined]

    def bring(self) -> None:
        """Fills the others."""
        raise NotImplementedError

    def send_back(self) -> None:
        """Fills the parameters of what the others are now."""
        raise NotImplementedError

    @property
    def updates(self) -> dict[torch.Tensor, bool]:
        """The parameters that ranks hold parts of; whether this rank updates each, whole."""
        raise NotImplementedError

    def close(self) -> None:
        """Does nothing any more."""
        for hook in self.hooks:
            hook.remove()

    def ready(self, optimizer: Optimizer) -> None:
        """Puts its own lists back where a step has ended in an error, and has this rank's part of a
        step begin behind all that others do before it.
        """
        self.restore(optimizer)
        self.within = 0
        optimizer._optimizer_step_pre_hooks.move_to_end(self.hooks[0].id)  # type: ignore[attr-defined]

    def restore(self, optimizer: Optimizer) -> None:
        """Puts the optimizer's own lists of parameters back."""
        if self.lists is None:
            return
        exchange_back(optimizer, self.others, self.lists)
        self.lists = None
        for other in self.others.values():
            if other is not None:
                other.grad = None
                other.data = other.data.new_empty(0)

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.within += 1
        if self.within > 1:
            return None
        self.bring()
        self.lists = exchange(optimizer, self.others)
        given = {name: self._around(optimizer, value) for name, value in kwargs.items()}
        return (args[0], *(self._around(optimizer, value) for value in args[1:])), given

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        self.within -= 1
        if not self.within:
            self.send_back()
            self.restore(optimizer)

    def _around(self, optimizer: Optimizer, closure: Any) -> Any:
        if not is_closure(closure):
            return closure

        @wraps(closure)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.send_back()
            self.restore(optimizer)
            found = closure(*args, **kwargs)
            self.bring()
            self.lists = exchange(optimizer, self.others)
            return found

        return run


class WholeTensors(Bringing):
    """Gives an optimizer whole tensors in its steps, each on one of its ranks."""

    def __init__(self, optimizer: Optimizer, home: Mapping[torch.Tensor, Home]) -> None:
        super().__init__(optimizer)
        self.shared: dict[torch.Tensor, Shared] = {}
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            place = place_of(p)
            if p in elsewhere:
                self.others[p] = None
            elif place is not None and p in home:
                self.shared[p] = Shared(p, place, home[p])
        self._deal()
        self.others |= {p: s.whole if s.is_owned else None for p, s in self.shared.items()}

    @property
    def updates(self) -> dict[torch.Tensor, bool]:
        """The parameters that it updates whole; whether this rank does."""
        return {p: shared.is_owned for p, shared in self.shared.items()}

    def _deal(self) -> None:
        """Gives every tensor an owner, the same on all its ranks."""
        loads: dict[tuple[int, int], int] = {}
        order = sorted(self.shared.values(), key=lambda s: (-_work(s.layout), s.name))
        for shared in order:
            shards = range(dist.get_world_size(shared.block) if shared.block else 1)
            ranks = range(shared.tp if shared.layout.is_split else 1)
            slots = [(shard, rank) for shard in shards for rank in ranks]
            shared.owner = min(slots, key=lambda slot: loads.get(slot, 0))
            loads[shared.owner] = loads.get(shared.owner, 0) + _work(shared.layout)

    @torch.no_grad()
    def bring(self) -> None:
        """Gives values and gradients to owners."""
        with call(CALL):
            for family in self._families():
                values = _to_owners(family, [plain(s.parameter) for s in family])
                given = [plain(s.parameter.grad) for s in family]  # type: ignore[arg-type]
                for k, gradient in _to_owners(family, given).items():
                    family[k].whole.data, family[k].whole.grad = values[k], gradient

    @torch.no_grad()
    def send_back(self) -> None:
        """Gives every rank its parts of owners' values."""
        with call(CALL):
            for family in self._families():
                for k, values in _from_owners(family).items():
                    own = plain(family[k].parameter)
                    own.copy_(values.view(own.shape))

    def _families(self) -> list[list[Shared]]:
        """What travels at once, of what has gradients: of each parameter all ranks or none have
        them. Tensors of one dtype, over the same groups, of a bounded size together.
        """
        found: dict[tuple[Any, ...], list[list[Shared]]] = {}
        shared = (s for p, s in self.shared.items() if p.grad is not None)
        for s in sorted(shared, key=lambda s: s.name):  # as on the other ranks
            shards = s.bucket.groups if s.bucket else None
            parts = s.tp if s.layout.is_split else 1
            families = found.setdefault((shards, parts, s.whole.dtype, s.home), [[]])
            if families[-1] and sum(map(_bytes_of, families[-1])) + _bytes_of(s) > TRAVEL_BYTES:
                families.append([])
            families[-1].append(s)
        return [family for families in found.values() for family in families]


def _work(layout: Layout) -> int:
    """What an update costs: of matrices as their product with themselves does."""
    shape = layout.shape
    return layout.numel * (min(shape[0], layout.numel // shape[0]) if len(shape) > 1 else 1)


def _bytes_of(shared: Shared) -> int:
    return shared.layout.numel * shared.whole.element_size()


def _to_owners(family: Sequence[Shared], parts: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The whole tensors that this rank owns, of all ranks' parts, by their place in the family;
    collective.
    """
    first, every = family[0], range(len(family))
    (shard, tp_rank), tp = first.here, first.tp
    near = [k for k in every if family[k].owner[0] == shard]
    shards = range(dist.get_world_size(first.block) if first.block else 1)
    sent = [[parts[k] for k in every if family[k].owner[0] == s] for s in shards]
    sizes = [[_extent(family[k].bounds(s)) for k in near] for s in shards]
    got = _exchanged(first, sent, sizes, first.block)
    order = sorted(shards, key=first.place_in_bucket)
    local = {k: _joined([got[s][n] for s in order]) for n, k in enumerate(near)}
    if not first.layout.is_split:
        return {k: local[k].view(family[k].layout.shape) for k in near}
    own = [k for k in near if family[k].owner[1] == tp_rank]
    sent = [[local[k] for k in near if family[k].owner[1] == t] for t in range(tp)]
    sizes = [[torch.Size(family[k].local_shape(t)).numel() for k in own] for t in range(tp)]
    got = _exchanged(first, sent, sizes, first.home.groups.of_weight(first.layout))
    found = {k: local[k].new_empty(family[k].layout.shape) for k in own}
    for n, k in enumerate(own):
        for t in range(tp):
            for box, view in _boxes(family[k], got[t][n], t):
                found[k][box].copy_(view)
    return found


def _from_owners(family: Sequence[Shared]) -> dict[int, torch.Tensor]:
    """This rank's parts of the whole tensors that ranks own, flat, by their place in the family;
    collective.
    """
    first, every = family[0], range(len(family))
    (shard, tp_rank), tp = first.here, first.tp
    near = [k for k in every if family[k].owner[0] == shard]
    local = {k: family[k].whole.data.reshape(-1) for k in near}
    if first.layout.is_split:
        own = [k for k in near if family[k].owner[1] == tp_rank]
        sent: Pieces = [[] for _ in range(tp)]
        for k in own:
            for t in range(tp):
                sent[t].append(family[k].whole.data.new_empty(family[k].local_shape(t)))
                for box, view in _boxes(family[k], sent[t][-1], t):
                    view.copy_(family[k].whole.data[box])
        there = [[k for k in near if family[k].owner[1] == t] for t in range(tp)]
        sizes = [[torch.Size(family[k].local_shape(tp_rank)).numel() for k in of] for of in there]
        got = _exchanged(first, sent, sizes, first.home.groups.of_weight(first.layout))
        local = {k: got[t][n] for t, of in enumerate(there) for n, k in enumerate(of)}
    shards = range(dist.get_world_size(first.block) if first.block else 1)
    sent = [[local[k][slice(*family[k].bounds(s))] for k in near] for s in shards]
    there = [[k for k in every if family[k].owner[0] == s] for s in shards]
    sizes = [[_extent(family[k].bounds(shard)) for k in of] for of in there]
    got = _exchanged(first, sent, sizes, first.block)
    return {k: got[s][n] for s, of in enumerate(there) for n, k in enumerate(of)}


def _extent(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]


def _boxes(shared: Shared, part: torch.Tensor, tp_rank: int) -> Any:
    """The boxes of the whole that a tp rank's part fills, and the part's memory of each."""
    place = Place(shared.name, shared.layout, shared.tp, tp_rank, 0, part.numel())
    for box in place.boxes:
        yield box.slices, place.view(part, box)


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat([*pieces])


def _exchanged(
    like: Shared, sent: Pieces, sizes: list[list[int]], group: dist.ProcessGroup | None
) -> Pieces:
    """What every rank of a group has sent to this one, as flat pieces of these sizes; what it sends
    itself, in the memory that it is in.
    """
    here = dist.get_rank(group) if group else 0
    own = [t.reshape(-1) for t in sent[here]]
    if group is None:
        return [own]
    sent = [of if r != here else [] for r, of in enumerate(sent)]
    sizes = [of if r != here else [] for r, of in enumerate(sizes)]
    flat = torch.cat([like.whole.data.new_empty(0), *(t.reshape(-1) for of in sent for t in of)])
    out = flat.new_empty(sum(map(sum, sizes)))
    received, given = [sum(of) for of in sizes], [sum(t.numel() for t in of) for of in sent]
    dist.all_to_all_single(out, flat, received, given, group=group)
    pieces = iter(torch.split(out, [n for of in sizes for n in of]))
    return [own if r == here else [next(pieces) for _ in of] for r, of in enumerate(sizes)]

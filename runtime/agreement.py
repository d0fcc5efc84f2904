"""Whether ranks that ought to train alike were given one batch and one optimizer, at every step.

Each rank adds two numbers to a message that is sent anyway, the sum of the losses: hashes of its
batch and of its optimizer's settings, times coefficients. Those of ranks that ought to agree add up
to zero, so that equal hashes do. Of every set of such ranks the hashes are scrambled differently,
lest values that were swapped between two sets cancel out.
"""

from __future__ import annotations

import re
import weakref
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from merakc.errors import MismatchError
from merakc.files.elements import bytes_of
from merakc.ir.program import Mesh
from merakc.runtime.groups import Groups
from merakc.runtime.state import digest
from merakc.runtime.streams import bring

# Of a larger tensor, blocks of elements at even distances, others at every step: to hash a batch of
# images takes a tenth of a millisecond then.
MAX_BYTES, _BLOCK = 2**18, 256
_BITS = 31  # of a hash: its multiples and their sums over ranks are exact in float64
_ODD = 0x9E3779B97F4A7C15  # the fractional digits of the golden ratio, which scatter bits
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # where Python put an object
# Steps with batches that are other ones each time, and the same for all dp ranks, are no chance.
MANY_ALIKE = 3
NO_OPTIMIZER = "no optimizer"
_BATCHES = "pick batches by model.data_parallel_rank, not by the global rank"


class Compared(Protocol):
    """What is compared over ranks at every step beside batches and optimizers."""

    def marks(self, step: int) -> torch.Tensor:
        """What a rank adds: float64 numbers, as many on every rank."""

    def look(self, step: int, sums: Sequence[float]) -> None:
        """Raises `MismatchError`, on every rank, where the sums say that ranks disagree."""


@dataclass(eq=False)
class Agreement:
    """The numbers of one rank. `leaves` are those of the batch that is running, if one is; `common`
    are its tensors that are the same for all samples, by name, `beside` the sizes that stand beside
    the samples in the others, by name and dim; `forward` is a mark of what is computed, where it is
    the same for all ranks.

    `settings` are those of the optimizers of the rank's `parameters` that have taken a step since
    the last loss, in words: what they were given, and all that they work with. The first is the
    same for all ranks, as their optimizers are of all parameters, by name; the second for those
    that hold the same ones.
    """

    groups: Groups
    parameters: Callable[[], Iterable[torch.Tensor]] = tuple
    leaves: Sequence[Any] | None = None
    compared: bool = False  # whether a batch was compared before it ran
    common: Mapping[str, torch.Tensor] = field(default_factory=dict)
    beside: Mapping[tuple[str, int], int] = field(default_factory=dict)
    forward: str = ""
    settings: dict[int, tuple[str, str]] = field(default_factory=dict)
    weights: Compared | None = None
    parted: str = ""  # why ranks' weights are of different steps, until weights are loaded
    warn: Callable[[], None] | None = None  # once, where all dp ranks train on the same batches
    _same: dict[int, int] = field(default_factory=dict)  # such batches' hashes, by step
    _ours: WeakKeyDictionary[Optimizer, bool] = field(default_factory=WeakKeyDictionary)
    _all: Sequence[torch.Tensor] = ()
    _hook: Any = None

    def __post_init__(self) -> None:
        """Looks at the settings of optimizers whenever they take a step, until `close`."""
        own = weakref.ref(self)

        def seen(optimizer: Optimizer, *_: Any) -> None:
            agreement = own()
            if agreement is not None:
                agreement.look(optimizer)

        self._hook = register_optimizer_step_post_hook(seen)

    def close(self) -> None:
        """Looks no more."""
        self._hook.remove()

    def look(self, optimizer: Optimizer) -> None:
        """Notes the settings of an optimizer, if it is of these parameters."""
        if optimizer not in self._ours:
            own = {id(p) for p in self.parameters()}
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            self._ours[optimizer] = not own.isdisjoint(held)
        if self._ours[optimizer]:
            given = settings_of(optimizer, getattr(optimizer, "defaults", None))
            self.settings[id(optimizer)] = given, settings_of(optimizer)

    def given(self, leaves: Sequence[Any]) -> None:
        """Notes the batch that runs next; the first one is compared at once, lest ranks that are
        given others wait for each other. Raises `MismatchError` where optimizers have parted.
        """
        if self.parted:
            raise MismatchError(self.parted)
        self.leaves = leaves
        if not self.compared:
            self.compared = True
            self._compare_batches(leaves)

    def _compare_batches(self, leaves: Sequence[Any]) -> None:
        """Raises `MismatchError` where the ranks of this replica were given other leaves.

        A sampler that counts ranks in place of dp ranks would train on garbage.
        """
        group = self.groups.axis("model")
        if group is None:
            return
        digests = [""] * group.size()
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        others = [_told(x) for x in leaves if not isinstance(x, torch.Tensor)]
        dist.all_gather_object(digests, f"{digest(tensors)} {others}", group=group)
        ranks = dist.get_process_group_ranks(group)
        odd = [r for r, d in zip(ranks, digests, strict=True) if d != digests[0]]
        if odd:
            raise MismatchError(
                f"ranks {odd} were given another batch than rank {ranks[0]}, with which they form "
                f"one data-parallel replica; {_BATCHES}"
            )

    def share(
        self, loss: torch.Tensor, step: int, nonfinite: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, bool]:
        """The sum of all ranks' losses, and whether any has found something `nonfinite`: a number
        above zero.

        Raises `MismatchError` on every rank where ranks that ought to agree do not.
        """
        world = self.groups.axis("world")
        if world is None:
            return loss.clone(), nonfinite is not None and bool(nonfinite)
        mesh, rank = self.groups.mesh, self.groups.rank
        leaves, common, forward = self.leaves, self.common, self.forward
        self.leaves, self.common, self.forward = None, {}, ""
        words = [*zip(*sorted(self.settings.values()), strict=True)] or [(), ()]
        optimizers, told = ("; ".join(own) for own in words)
        self.settings.clear()
        job = f"{optimizers or NO_OPTIMIZER}, {self._trained()}"
        value = hash_of(leaves or (), step)
        marks = [
            batch_mark(value, mesh, rank),
            settings_mark(zlib.crc32(told.encode()), mesh, rank),
            common_mark(zlib.crc32((job + forward).encode()), mesh, rank),
            common_mark(hash_of(common.values(), step), mesh, rank),
            common_mark(value, mesh, rank),
        ]
        sums = bring(torch.tensor([0.0, *marks, 0.0], dtype=torch.float64), loss.device)
        sums[0] = loss
        if nonfinite is not None:
            sums[-1:] = nonfinite
        if self.weights is not None:
            sums = torch.cat([sums, bring(self.weights.marks(step), loss.device)])
        dist.all_reduce(sums, group=world)
        batches, stages, jobs, alike, unlike, bad, *weights = sums[1:].tolist()
        if batches:
            self._compare_batches(leaves or ())
            raise MismatchError(
                f"ranks of another data-parallel replica were given different batches; {_BATCHES}"
            )
        if jobs:
            _check_forwards(forward, world)
            self._tell_optimizers(job, world, lambda rank: 0)
        if stages:
            self._tell_optimizers(told, world, lambda rank: mesh.coordinates(rank)[1])
        if alike:
            self._tell_common(common, world)
        if self.weights is not None:
            self.weights.look(step, weights)
        self._watch(step, value if mesh.dp > 1 and not unlike else None)
        return sums[0].to(loss.dtype), bad > 0

    def _trained(self) -> str:
        """How many parameters need gradients, and a hash of which."""
        self._all = self._all or [*self.parameters()]
        needed = [p.requires_grad for p in self._all]
        return f"{sum(needed)} trained parameters ({zlib.crc32(bytes(needed)):x})"

    def _watch(self, step: int, same: int | None) -> None:
        """Warns once where the batches of several training steps were the same on all ranks.

        Of the calls with one number of a step, the last is that which trains.
        """
        self._same.pop(step, None)
        before = [self._same.get(k) for k in range(step - MANY_ALIKE, step)]
        if self.warn and None not in before and len(set(before)) == MANY_ALIKE:
            self.warn()
            self.warn = None
        self._same = {k: v for k, v in self._same.items() if k > step - MANY_ALIKE}
        if same is not None:
            self._same[step] = same

    def _tell_optimizers(
        self, told: str, world: dist.ProcessGroup, kind: Callable[[int], int]
    ) -> None:
        """Names a rank whose settings are others than those of the first of its kind. Where either
        has taken a step, their weights have parted.
        """
        everyone = [""] * world.size()
        dist.all_gather_object(everyone, told, group=world)
        first: dict[int, int] = {}
        for rank, own in enumerate(everyone):
            other = first.setdefault(kind(rank), rank)
            if own != everyone[other]:
                both = [text or NO_OPTIMIZER for text in (own, everyone[other])]
                found = (
                    f"rank {rank} trains with other settings than rank {other}: {both[0]} in place "
                    f"of {both[1]}"
                )
                if not all(text.startswith(NO_OPTIMIZER) for text in both):
                    self.parted = (
                        f"the weights of the ranks are those of different steps since {found}; "
                        "load a checkpoint on all ranks, or start again"
                    )
                raise MismatchError(
                    f"{found}; give all ranks the same optimizer; by parameters' names it may have "
                    "groups"
                )

    def _tell_common(self, common: Mapping[str, torch.Tensor], world: dist.ProcessGroup) -> None:
        """Names a tensor that is not the same for all. Those that are as long as a rank's texts
        differ in shape, and are not compared then.
        """
        everyone: list[Any] = [None for _ in range(world.size())]
        own = {name: (tuple(x.shape), digest([x])) for name, x in common.items()}
        dist.all_gather_object(everyone, (own, dict(self.beside)), group=world)
        first: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
        for rank, (found, _) in enumerate(everyone):
            for name, (shape, value) in found.items():
                other, expected = first.setdefault((name, shape), (rank, value))
                if value != expected:
                    raise _not_common(name, f"of shape {list(shape)}", other, rank)
        for name in own:
            shapes = [found[name][0] for found, _ in everyone]
            unlike = of_other_size(shapes, [beside for _, beside in everyone])
            if unlike is not None:
                raise _not_common(name, f"of shapes {[list(s) for s in shapes]}", 0, unlike)


def _check_forwards(own: str, world: dist.ProcessGroup) -> None:
    """Raises `MismatchError` where ranks have recorded other forwards than rank 0; collective."""
    everyone = [""] * world.size()
    dist.all_gather_object(everyone, own, group=world)
    odd = [rank for rank, forward in enumerate(everyone) if forward != everyone[0]]
    if odd:
        raise MismatchError(
            f"ranks {odd} have recorded another forward than rank 0, of batches of one shape; "
            "a forward must not go by the rank, by time or by chance, and all ranks must have the "
            "same code and packages"
        )


def of_other_size(
    shapes: Sequence[tuple[int, ...]], beside: Sequence[Mapping[tuple[str, int], int]]
) -> int | None:
    """The first rank on which a tensor has another shape than on rank 0 and is not as long there as
    some dim beside the samples, as positions are as many as the tokens of a rank's texts.
    """
    lengths = {key: tuple(own.get(key) for own in beside) for key in beside[0]}
    known = set(lengths.values())
    for rank, shape in enumerate(shapes):
        if len(shape) != len(shapes[0]):
            return rank
        for dim, size in enumerate(shape):
            if size != shapes[0][dim] and tuple(s[dim] for s in shapes) not in known:
                return rank
    return None


def _not_common(name: str, what: str, one: int, other: int) -> MismatchError:
    return MismatchError(
        f"tensor '{name}' of the batch, {what}, is taken to be the same for all samples, and "
        f"differs between ranks {one} and {other}; where it holds samples, say so: "
        f"auto_parallel(..., batch_dims={{{name!r}: (0, None)}}) has as many rows of dim 0 for "
        "each; or give all ranks the same"
    )


def batch_mark(value: int, mesh: Mesh, rank: int) -> float:
    """What a rank adds for the hash of its batch; over the ranks of a replica the sum is zero."""
    dp, pipeline_rank, lane = mesh.coordinates(rank)
    return _mark(value, dp, mesh.lanes * mesh.pp, pipeline_rank == lane == 0)


def settings_mark(value: int, mesh: Mesh, rank: int) -> float:
    """What a rank adds for the hash of its optimizers; over the ranks of each pipeline rank the sum
    is zero: they hold the same parameters, or parts of them.
    """
    dp, pipeline_rank, lane = mesh.coordinates(rank)
    return _mark(value, pipeline_rank, mesh.dp * mesh.lanes, dp == lane == 0)


def common_mark(value: int, mesh: Mesh, rank: int) -> float:
    """What a rank adds for the hash of what all have; over all ranks the sum is zero."""
    return _mark(value, 0, mesh.world_size, rank == 0)


def hash_of(leaves: Iterable[Any], step: int) -> int:
    """The hash of a batch's leaves, or of some elements of the large ones, others at each step."""
    found = 0
    for leaf in leaves:
        data = _sample(leaf, step) if isinstance(leaf, torch.Tensor) else _told(leaf).encode()
        found = zlib.crc32(data, found)
    return found


def _mark(value: int, place: int, ranks: int, first: bool) -> float:
    scrambled = (value + 1) * (2 * place + 1) * _ODD % 2**64 >> 64 - _BITS
    return float(scrambled * (ranks - 1 if first else -1))


def _told(value: Any) -> str:
    """What is no tensor, in words that are the same on every rank."""
    return _ADDRESS.sub("", repr(value))


def _sample(tensor: torch.Tensor, step: int) -> Any:
    """The bytes of a tensor on the CPU; of a large one, of some of its elements."""
    flat = tensor.detach().reshape(-1)
    stride = -(-flat.numel() * flat.element_size() // MAX_BYTES)
    if stride > 1:
        whole = flat.numel() // _BLOCK * _BLOCK
        flat = flat[:whole].view(-1, _BLOCK)[step % stride :: stride]
    return bytes_of(flat).numpy()


def settings_of(optimizer: Optimizer, names: Container[str] | None = None) -> str:
    """The numbers that an optimizer works with, group by group; those of these names, if given."""
    told = [
        ", ".join(
            f"{k}={_number(v)}"
            for k, v in sorted(g.items())
            if k != "params" and (names is None or k in names) and _number(v) is not None
        )
        for g in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({' | '.join(dict.fromkeys(told))})"


def _number(value: Any) -> Any:
    """A setting that is a number or several; None of others."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)) and value and all(_number(v) is not None for v in value):
        return value
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

"""Samplers and loaders that deal a data set to the data-parallel ranks.

The ranks of one replica get the same samples, those of others get others. A global batch is what
one process would have read, whatever dp is: its samples in blocks, one for each dp rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from merakc.errors import ConfigError
from merakc.files.printable import count_of
from merakc.ir.layout import block_bounds
from merakc.ir.plan import Plan
from merakc.runtime.groups import agree


@runtime_checkable
class DataParallel(Protocol):
    """A parallel model, as far as its data go."""

    @property
    def data_parallel_rank(self) -> int:
        """This rank's number among those that train on other data."""
        ...

    @property
    def data_parallel_size(self) -> int:
        """How many of them there are."""
        ...


class Sized(Protocol):
    """A data set whose samples are read by their numbers."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """A sample."""
        ...


def sampler(
    dataset: Sized,
    model: DataParallel | Plan,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> DistributedSampler[Any]:
    """A sampler of this rank's samples, for a `DataLoader` whose `batch_size` is a dp rank's.

    Call `set_epoch(epoch)` before each epoch, as of any `DistributedSampler`. Raises `ConfigError`
    where the samples do not divide over dp, unless `drop_last` leaves out those that are over.
    """
    rank, size = _place(model)
    if len(dataset) % size and not drop_last:
        raise ConfigError(
            f"{count_of(len(dataset), 'sample')} cannot be divided over dp={size}: some ranks "
            "would read samples twice to have as many as others; give drop_last=True, or use "
            "merakc.dataloader, which deals any number"
        )
    return DistributedSampler(
        dataset, size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last  # type: ignore[arg-type]
    )  # fmt: skip


def dataloader(
    dataset: Sized,
    model: DataParallel | Plan,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> Loader:
    """A `DataLoader` of this rank's part of each global batch.

    `batch_size` is the whole job's: an epoch is the same batches of samples for every dp. Each new
    epoch is shuffled anew where `shuffle` asks for it. All ranks must read epochs in the same
    order. The loader has a `state_dict()`, as of `merakc.save(..., extra=loader)`: a run goes on
    within an epoch, behind the batches that it has read, on any dp.

    Args:
        dataset: it has a length, and samples by number.
        model: what `auto_parallel` returned, or a plan of `merakc.plan_for`.
        batch_size: the samples of a global batch.
        shuffle: whether epochs are in random order, that follows from `seed` and the epoch.
        seed: of the order.
        drop_last: whether the last batch, where it is smaller, is left out.
        options: of `DataLoader`: num_workers, pin_memory, collate_fn, ...

    Raises `ConfigError` where a batch would leave a dp rank without samples.
    """
    batches = Dealt(len(dataset), *_place(model), batch_size=batch_size)
    batches.shuffle, batches.seed, batches.drop_last = shuffle, seed, drop_last
    batches.check()
    return Loader(dataset, batch_sampler=batches, **options)  # type: ignore[arg-type]


class Loader(DataLoader[Any]):
    """A loader that knows how far it was read, and goes on from there."""

    batch_sampler: Dealt
    _read: tuple[int, int] | None = None  # the epoch, and how many of its batches

    def __iter__(self) -> Any:
        """An epoch, or the rest of one."""
        epoch, first = self.batch_sampler.epoch, self.batch_sampler.first
        self._read = epoch, first
        for k, batch in enumerate(super().__iter__(), start=first + 1):
            self._read = epoch, k
            yield batch
        self._read = None

    def state_dict(self) -> dict[str, Any]:
        """How far it was read, and of what: the same on all ranks."""
        dealt = self.batch_sampler
        epoch, batches = self._read or (dealt.epoch, dealt.first)
        return {"epoch": epoch, "batches": batches, **dealt.order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another was; raises `ConfigError` where its batches were others."""
        own = self.batch_sampler.order()
        others = [f"{k} {state.get(k)}, and {v} here" for k, v in own.items() if state.get(k) != v]
        if others:
            raise ConfigError(
                f"a data loader cannot go on where another was, of other batches: "
                f"{'; '.join(others)}. Make it as that one was made, or begin an epoch: set "
                "loader.batch_sampler.epoch"
            )
        self.batch_sampler.epoch, self.batch_sampler.first = state["epoch"], state["batches"]
        self._read = None


class Dealt(Sampler[list[int]]):
    """The numbers of this dp rank's samples of each global batch."""

    shuffle, seed, drop_last = False, 0, False
    epoch, first = 0, 0  # of the next iteration: the epoch, and its first batch

    def __init__(self, samples: int, rank: int, size: int, *, batch_size: int) -> None:
        self.samples, self.rank, self.size, self.batch_size = samples, rank, size, batch_size

    def check(self) -> None:
        """Raises `ConfigError` for batches that cannot be dealt to all dp ranks."""
        last = 0 if self.drop_last else self.samples % max(1, self.batch_size)
        for count in (self.batch_size, last or self.batch_size):
            if count < self.size:
                raise ConfigError(
                    f"a batch of {count_of(count, 'sample')} leaves some of {self.size} "
                    f"data-parallel ranks without one (batch_size={self.batch_size} of "
                    f"{count_of(self.samples, 'sample')}); give drop_last=True, another "
                    "batch_size, auto_parallel a smaller dp, or every rank whole batches, of any "
                    "number of samples (a plain DataLoader, model.read_whole_batches())"
                )

    def order(self) -> dict[str, Any]:
        """All that the batches of an epoch follow from, on every dp."""
        return {
            "samples": self.samples, "batch_size": self.batch_size, "shuffle": self.shuffle,
            "seed": self.seed, "drop_last": self.drop_last,
        }  # fmt: skip

    def __len__(self) -> int:
        """The batches of an epoch."""
        full, rest = divmod(self.samples, self.batch_size)
        return full + bool(rest and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """An epoch, from its `first` batch on; the next one counts one more."""
        epoch, first = self.epoch, self.first
        place = f"epoch {epoch}, batch {first}, seed {self.seed}"
        agree(lambda: {"the data loader's epoch": place})
        order = torch.arange(self.samples)
        if self.shuffle:
            drawn = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.samples, generator=drawn)
        self.epoch, self.first = epoch + 1, 0
        for k in range(first, len(self)):
            start = k * self.batch_size
            batch = order[start : start + self.batch_size].tolist()
            first, last = block_bounds(len(batch), self.size, self.rank)
            yield batch[first:last]


def _place(model: DataParallel | Plan) -> tuple[int, int]:
    """This rank's number among the data-parallel ranks, and how many there are."""
    if isinstance(model, Plan):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return model.mesh.coordinates(rank)[0], model.dp
    if not isinstance(model, DataParallel):
        raise ConfigError(
            f"data are dealt for a {type(model).__name__}: give the model that auto_parallel "
            "returned, or the plan of merakc.plan_for(model, batch)"
        )
    return model.data_parallel_rank, model.data_parallel_size

"""What a split of the batch into parts does to a value, and what is computed for the whole batch.

A *part* is what one micro-batch of one data-parallel rank holds. The value of a graph for the whole
batch follows from those of the parts in one of three ways (`Share`): their samples stand one after
the other (rows), they add up (a sum), or they are all the same (a constant).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Literal

import torch

from merakc.ir.graph import Graph, TensorSpec
from merakc.ir.same import Same

# What samples that the loss couples are coupled with: those of the whole batch, as in one process,
# or those of their micro-batch, which then counts as a batch of its own.
Couplings = Literal["whole batch", "per micro-batch"]
WHOLE_BATCH: Final = "whole batch"
PER_MICRO_BATCH: Final = "per micro-batch"


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the samples of a value stand: its dim `dim` is `outer` x samples x `inner`.

    The batch's own tensors have (dim, 1, 1); two images for each text of a batch (0, 1, 2); two
    views of the samples, one behind the other, (0, 2, 1).
    """

    dim: int = 0
    outer: int = 1
    inner: int = 1

    def take(self, value: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """The part of `count` samples from sample number `first` on of a value of all samples."""
        return (
            self._parted(value).narrow(self.dim + 1, first, count).flatten(self.dim, self.dim + 2)
        )

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The value of all samples, from its parts in the order of their samples."""
        whole = torch.cat([self._parted(part) for part in parts], self.dim + 1)
        return whole.flatten(self.dim, self.dim + 2)

    def samples(self, shape: Sequence[int]) -> int:
        """How many samples a value of this shape holds."""
        return shape[self.dim] // (self.outer * self.inner)

    def sized(self, shape: Sequence[int], samples: int) -> tuple[int, ...]:
        """The shape of the same value for so many samples."""
        now = self.outer * samples * self.inner
        return (*shape[: self.dim], now, *shape[self.dim + 1 :])

    def _parted(self, value: torch.Tensor) -> torch.Tensor:
        outer, inner = value.shape[: self.dim], value.shape[self.dim + 1 :]
        return value.reshape(*outer, self.outer, self.samples(value.shape), self.inner, *inner)


# Where the samples of the batch's tensors stand, by the names of these or patterns of them
# ("targets.*"); None where a tensor is the same for all samples. `inner` is 0 where each sample has
# as many rows as there are. Of all other tensors the sizes tell.
BatchDims = Mapping[str, Rows | None]
BY_SIZE: Final[BatchDims] = {}


class ShareKind(StrEnum):
    """How the value of the whole batch follows from those of its parts."""

    ROWS = "rows"
    SUM = "sum"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Share:
    """A value that every part hands over to a graph of the whole batch.

    `name` is that of the part's output and of the other graph's input; `spec` is the value's for
    the whole batch. `rows` says where its samples stand, None where it is no rows.
    """

    name: str
    kind: ShareKind
    spec: TensorSpec
    rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How the samples of a batch lie: `sizes` has those of every dp rank, each in `micro_batches`
    parts of one size; `dp_rank` is the rank that asks. They are `alike` where they differ in their
    samples alone. Of a batch of fewer samples than there are dp ranks each of these, of which there
    are `copies`, runs all.
    """

    sizes: tuple[int, ...]
    micro_batches: int
    dp_rank: int = 0
    alike: bool = field(default=True, compare=False)
    copies: int = 1

    @property
    def own(self) -> int:
        """Samples of this dp rank."""
        return self.sizes[self.dp_rank]

    @property
    def total(self) -> int:
        """Samples of the whole batch."""
        return sum(self.sizes)

    @property
    def each(self) -> int:
        """Samples of one part of this dp rank."""
        return self.own // self.micro_batches

    @property
    def least(self) -> int:
        """Samples of the smallest part of any dp rank."""
        return min(self.sizes) // self.micro_batches

    @property
    def parts(self) -> int:
        """Number of parts of the whole batch."""
        return len(self.sizes) * self.micro_batches

    def first(self, micro_batch: int) -> int:
        """The number, in the whole batch, of the first sample of a micro-batch of this rank."""
        return sum(self.sizes[: self.dp_rank]) + micro_batch * self.each

    @property
    def share(self) -> float:
        """What one part of this rank holds of all samples."""
        return self.each / self.total


@dataclass(frozen=True, slots=True)
class Head:
    """The part of the forward that couples the samples of a batch; it runs once for all of them.

    The parts end at the `waist`, outputs of their graph (of kind `WAIST`, in a step). `graph` reads
    what they make together, under the same names (inputs of kind `ACTIVATION`), and values of the
    batch alone (`KNOWN`); it has no parameters. Its outputs are the loss, and other results of the
    forward where they were asked for. `source` is the user's line that couples, `why` how.
    """

    graph: Graph
    waist: tuple[Share, ...]
    source: str = ""
    why: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of the waist of the whole batch."""
        return sum(math.prod(s.spec.shape) * s.spec.dtype.itemsize for s in self.waist)


@dataclass(frozen=True, slots=True)
class Known:
    """What is computed before the step, of the batch alone.

    Every part runs `part`, whose outputs are handed over to `whole`, which every rank runs on what
    they make together, over all dp ranks. Its results are inputs of the step under their names;
    `rows` says where the samples stand in each, of which a part reads its own, None where it reads
    all.
    """

    part: Graph
    whole: Head
    rows: Mapping[str, Rows | None]

    def without_nodes(self, same: Same | None = None) -> Known:
        """The same without the nodes of its graphs."""
        whole = replace(self.whole, graph=self.whole.graph.without_nodes(same))
        return replace(self, part=self.part.without_nodes(same), whole=whole)


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """A step in parts: the losses of the parts add up to that of the batch, and so do gradients.

    `graph` is that of a part. `results` says of its other outputs how those of the parts make that
    of the whole batch. `written` has the buffers that are written once, behind all parts, of which
    every part reads what they were before, and how. `conventions` names, with its line, what holds
    by convention alone. `scaled` are the weights whose products are in float8.
    """

    graph: Graph
    known: Known | None = None
    head: Head | None = None
    results: Mapping[str, tuple[ShareKind, Rows | None]] = field(default_factory=dict)
    written: Mapping[str, ShareKind] = field(default_factory=dict)
    conventions: tuple[str, ...] = ()
    scaled: frozenset[str] = frozenset()

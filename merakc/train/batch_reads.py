"""Which compiled step a batch has, where its forward reads numbers of the batch in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from merakc.batches.split import cast_floats, named_tensors, split_batch
from merakc.errors import MismatchError
from merakc.frontend.values.reads import Reads
from merakc.ir.batches import BatchDims
from merakc.ir.plan import Plan


def micro_batches_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan, dims: BatchDims, parts: int = 0
) -> list[dict[str, torch.Tensor]]:
    """The tensors of each micro-batch, by name; of so many `parts` where they are to be others.
    Samples stand where `dims` say.
    """
    dtype = plan.precision.dtype("compute") if plan.precision else None
    now = cast_floats(args, kwargs, dtype)
    split = split_batch(*now, parts or plan.micro_batches, dims)
    return [named_tensors(*part) for part in split]


@dataclass(eq=False)
class BatchReads:
    """What the recordings of one model have read, by the key of all else that they depend on."""

    known: dict[Any, list[tuple[Reads | None, Reads | None]]] = field(default_factory=dict)

    def add(self, key: Any, reads: Reads | None, of_whole: Reads | None) -> Any:
        """The key of a new recording's step, with what the recording has read, and what that of
        the whole batch has, where the parts do not say it.
        """
        if reads is None and of_whole is None:
            return key
        self.known.setdefault(key, []).append((reads, of_whole))
        return key, reads and reads.answers, of_whole and of_whole.answers

    def key(self, key: Any, parts: Callable[[int], Sequence[Mapping[str, torch.Tensor]]]) -> Any:
        """The key of the step whose recording read what all parts of a batch say, and the whole;
        `key` itself where there is none. `parts` gives so many of a batch, or with 0 a plan's.
        """
        known = self.known.get(key, ())
        given = parts(0) if known else ()
        for reads, of_whole in known:
            if reads is not None and any(map(reads.difference, given)):
                continue
            if of_whole is None or not of_whole.difference(parts(1)[0]):
                return key, reads and reads.answers, of_whole and of_whole.answers
        return key

    def agree(self, reads: Reads | None, group: dist.ProcessGroup | None) -> None:
        """Refuses a batch of which the forward reads other numbers than of those of the other dp
        ranks: what it computes with them would not be that of one batch. Collective.
        """
        if group is None or not self.known:
            return
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, reads.answers if reads else (), group=group)
        odd = [rank for rank, answers in enumerate(every) if answers != every[0]]
        if odd:
            lines = sorted({read.source for read in reads.asked}) if reads else []
            raise MismatchError(
                f"the forward reads other numbers of its batch on dp ranks {odd} than on dp rank "
                f"0: {every[odd[0]]} in place of {every[0]}, at {', '.join(lines)}; batches must "
                "agree in what Python reads of them: pad them alike, or keep the numbers in tensors"
            )

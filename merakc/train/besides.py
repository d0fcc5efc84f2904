"""What a step does beside computing: checks of its batch before, changes to the batch after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from merakc.batches.split import named_tensors
from merakc.errors import ForwardError
from merakc.frontend.aside import edited
from merakc.frontend.python.plain_tensors import check_memory
from merakc.ir.batches import BatchLayout
from merakc.passes.batches.recorded import BatchRecording
from merakc.train.knowledge import Knowledge

Tensors = dict[str, torch.Tensor]


class Besides:
    """Does it, for batches that lie as `layout` says; `state` and `group` as in `Knowledge`."""

    def __init__(
        self,
        recording: BatchRecording,
        layout: BatchLayout,
        state: Callable[[str], torch.Tensor],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.aside, self.left, self.layout = recording.of_batch, recording.left, layout
        known = self.aside.known
        self.knowledge = Knowledge(known, layout, state, device, group) if known else None

    @torch.no_grad()
    def before(
        self, batches: Sequence[Tensors], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensors:
        """The values of the whole batch, of which this rank was given its own; collective over dp.

        Raises `ForwardError`, on every rank, where one of the forward's checks of it fails, and
        `RecordError` where what it writes to a tensor would be seen in another one, too.
        """
        if written := {target for target, _ in self.aside.writes}:
            given = {n: tensor.detach() for n, tensor in named_tensors(args, kwargs).items()}
            check_memory(given, written)
        values = self.knowledge.run(batches) if self.knowledge is not None else {}
        found = {name: values[known] for name, known in self.aside.names.items()}
        for check in self.aside.checks:
            if bool(found[check.name]) is not check.wanted:
                raise ForwardError(
                    f"{check.source}: this check of the forward's fails for the batch; mend the "
                    "batch"
                )
        return found

    @torch.no_grad()
    def after(self, found: Tensors, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Does to a batch what the forward does, and leaves in Python what it leaves: whether that
        changes anything there.
        """
        own = {name: self._own(name, value) for name, value in found.items()}
        tensors = named_tensors(args, kwargs) if self.aside.writes else {}
        for target, name in self.aside.writes:
            tensors[target].copy_(own[name])
        edited(self.aside.edits, (args, kwargs), own)
        put = [left.put() for left in self.left]
        return any(put)

    def take_back(self) -> None:
        """Takes back what stands in Python for what is not there."""
        for left in self.left:
            left.take_back()

    def _own(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """What this dp rank's batch has of a value."""
        known = self.aside.known
        rows = known.rows[self.aside.names[name]] if known is not None else None
        return rows.take(value, self.layout.first(0), self.layout.own) if rows else value


class Nothing(Besides):
    """A second run of a step changes nothing in Python, nor in its batch, once more."""

    def __init__(self) -> None:
        pass

    def before(self, *_: Any) -> Tensors:
        """No checks."""
        return {}

    def after(self, found: Tensors, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """No changes."""
        return False

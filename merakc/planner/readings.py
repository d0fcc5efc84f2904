"""The recordings of the forward that `auto_parallel` is given, as its batch may be read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from merakc.batches.split import (
    call_arguments,
    resized,
    sample_rows,
    tensor_specs,
    with_tensor_specs,
)
from merakc.frontend.python.compared import Compared
from merakc.frontend.record import Recording
from merakc.frontend.values.outside import WithLoss, stand_in
from merakc.frontend.values.reads import ValuesNeededError
from merakc.ir.batches import BatchLayout
from merakc.lowering.find_samples import check_lists, find_samples
from merakc.lowering.recording import record_part, with_loss
from merakc.passes.batches.recorded import BatchRecording
from merakc.planner.request import Request, meshes
from merakc.planner.requested import Requested, first_parts


@dataclass
class Readings:
    """A forward's recordings by the samples of a part, each made once.

    `asked` holds a request for each way to read the `batch`; which of them reads it as the forward
    does shows once it was recorded. `joined` says whether ranks' batches may be joined along
    another dim. `tensors` are those of rank 0's batch, where the forward reads them in Python.
    """

    model: nn.Module
    batch: Any
    asked: Requested
    device: torch.device
    joined: bool = False
    tensors: list[torch.Tensor] = field(default_factory=list)
    compared: Compared = field(default_factory=Compared)  # forwards of any part of the batch
    _made: dict[tuple[int, int, int], BatchRecording] = field(default_factory=dict)

    @cached_property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A batch of rank 0's shapes."""
        return with_tensor_specs(*call_arguments(self.batch), self.asked.specs, self.tensors)

    @cached_property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same with this rank's values, where its own batch is of these shapes."""
        own = call_arguments(self.batch)
        return own if tensor_specs(*own) == self.asked.specs else self.example

    @cached_property
    def reading(self) -> int:
        """Which request reads the batch as the forward does. Raises what stands against it."""
        every, chosen = range(len(self.asked.readings)), 0
        if len(every) > 1:
            whole = partial(self._recorded, parts=1, dp=1)
            chosen = find_samples(every, self._first, whole, joined=self.joined)
        if chosen == 0 and self.asked.undivided is not None:
            raise self.asked.undivided
        return chosen

    @property
    def request(self) -> Request:
        """The request that reads the batch as the forward does."""
        return self.asked.readings[self.reading]

    @property
    def first(self) -> BatchRecording:
        """That of the first part that is likely needed."""
        recording = self._first(self.reading)
        check_lists(recording, self.asked.readings[0].batch_dims)
        return recording

    def needs_values(self) -> bool:
        """Whether the forward reads more of its batch than shapes; what else may fail, will again.

        The values that `use` is given are then needed.
        """
        try:
            _ = self.first
        except ValuesNeededError:
            return True
        except Exception:
            return False
        return False

    def use(self, tensors: list[torch.Tensor]) -> None:
        """Takes the values of rank 0's batch."""
        self.tensors += tensors
        self.__dict__.pop("example", None)

    def of_size(self, samples: int) -> Readings:
        """Those of a batch of so many samples: the first ones, or all of them several times."""
        if samples == self.request.batch_size:
            return self
        sized = replace(self.request, batch_size=samples)
        asked = replace(self.asked, readings=[sized], undivided=None)
        other = replace(self, asked=asked, _made={})
        rows = sample_rows(*self.example, sized.batch_dims)
        other.__dict__["example"] = resized(*self.example, rows, samples)
        other.__dict__["given"] = resized(*self.given, rows, samples)
        return other

    def in_parts(self, parts: int, dp: int | None = None) -> BatchRecording:
        """The recording of one of so many parts of the batch, on each of so many dp ranks, the
        likely ones if not said.
        """
        dp = self.asked.likely_dp if dp is None else dp
        return with_loss(self._recorded(self.reading, parts, dp))

    def of_samples(self, samples: int) -> Recording:
        """The recording of a micro-batch of so many samples: of one of so many parts of the batch,
        or, where they do not divide it, from the shapes of the batch.
        """
        parts, left = divmod(self.request.batch_size, samples)
        if not left:
            return self.in_parts(parts)
        rows = sample_rows(*self.example, self.request.batch_dims)
        sized = replace(self.request, batch_size=samples)
        return with_loss(self._record(resized(*self.example, rows, samples), sized, 1, 2))

    def _first(self, reading: int) -> BatchRecording:
        parts = first_parts(self.asked.readings[reading], self.asked.plan)
        return self._recorded(reading, parts, self.asked.likely_dp)

    def _recorded(self, reading: int, parts: int, dp: int) -> BatchRecording:
        key = reading, parts, dp
        if key not in self._made:
            request = self.asked.readings[reading]
            self._made[key] = self._record(self.example, request, parts, dp)
        return self._made[key]

    def _record(
        self, example: tuple[tuple[Any, ...], dict[str, Any]], request: Request, parts: int, dp: int
    ) -> BatchRecording:
        """Of a part of a batch of so many, on each of `dp` ranks; with a loss that stands in where
        the forward has none.
        """
        layout = BatchLayout((request.batch_size,) * dp, parts)
        divided = request.overlap != 0 and any(mesh.lanes > 1 for mesh in meshes(request))
        record = partial(
            record_part, args=example[0], kwargs=example[1], layout=layout, device=self.device,
            precision=request.precision, couplings=request.couplings, dims=request.batch_dims,
            divided=divided, compared=self.compared,
        )  # fmt: skip
        recording = record(self.model)
        return recording if recording.has_loss else record(WithLoss(self.model, stand_in))

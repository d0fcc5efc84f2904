"""A forward of one batch, recorded for any number of its samples."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from merakc.batches.split import (
    named_tensors,
    resized,
    sample_rows,
    signature,
    split_batch,
    taken_dims,
)
from merakc.errors import ForwardError, OtherSizeError, RecordError, failure
from merakc.files.printable import count_of
from merakc.frontend.calls.around import decimal_settings
from merakc.frontend.python.compared import Compared
from merakc.frontend.record import Recording, record, without_aside
from merakc.frontend.regions import WHY
from merakc.frontend.values.reads import Read, Reads
from merakc.ir.batches import BatchDims, BatchLayout
from merakc.ir.graph import InputKind, OutputKind, Ref
from merakc.kernels.opaque import OPAQUE, find
from merakc.passes.batches.alike import OtherPathError, of_one_sample
from merakc.passes.batches.analyse import Analysis, retaken
from merakc.passes.batches.answers import unsaid
from merakc.passes.batches.part import known_name
from merakc.passes.batches.recorded import BatchAside
from merakc.passes.batches.split import known_alone, known_values
from merakc.passes.pipeline import RECORDED
from merakc.passes.running import CHECKED, run_passes

# Recordings by whether shapes are settled and the form of the batch.
Shared = dict[tuple[bool, tuple[Any, ...]], Recording]


class Forward:
    """A model's forward of one batch, with any number of its samples, each recorded once."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        layout: BatchLayout,
        device: torch.device,
        dtype: torch.dtype | None,
        dims: BatchDims,
        shared: Shared,
        compared: Compared,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.shared, self.compared = shared, compared
        self.layout, self.device, self.dtype, self.dims = layout, device, dtype, dims
        self.sampled = sample_rows(args, kwargs, dims)
        tensors = {n: t for n, t in named_tensors(args, kwargs).items() if t.dim()}
        self.taken = taken_dims({n: self.sampled.get(n) for n in tensors})
        self.known: dict[int, Recording] = {}
        self.derived: set[int] = set()  # of which the forward was not run
        self.settling = False

    @property
    def has_regions(self) -> bool:
        """Whether shapes depend on values in what was recorded, and need not."""
        made = self.known.get(self.layout.each)
        nodes = made.graph.nodes if made is not None and not self.settling else ()
        return any(n.op == OPAQUE and find(n.args[-1]).reason == WHY for n in nodes)

    def settled(self) -> Forward:
        """The same, with the shapes that the batch says."""
        now = copy(self)
        now.known, now.derived, now.settling = {}, set(), True
        vars(now).pop("unsaid", None)
        return now

    def part(self) -> Recording:
        """The recording of the first part."""
        layout = self.layout
        part = self.sized(layout.each)
        return part if layout.each > 1 or layout.parts == 1 else self.one()

    def one(self) -> Recording:
        """The recording of one sample as a part of the batch."""
        alone, two, wide = self.sized(1), self.sized(2), wide_of(self.layout.total)
        with telling(self.taken):
            graphs = (alone.everything, two.everything, self.sized(wide).everything)
            graph = of_one_sample(*graphs, wide)
        if graph is alone.everything:
            return alone
        full, step = (graph, without_aside(graph)) if two.aside else (None, graph)
        # Two samples are told what one says; of a part of one only that one's numbers can be asked.
        return replace(two, graph=step, full=full, reads=alone.reads)

    def rest(self, found: Analysis) -> Analysis | None:
        """What is found of the samples behind as many parts of equal size as there are, if any."""
        left = found.total % found.samples
        if not left:
            return None
        try:
            graph = (self.one() if left == 1 else self.sized(left)).everything
            return retaken(found, graph, found.whole, left, found.total)
        except RecordError:  # a size of part that no rank has
            return None

    def of_whole(self) -> Reads | None:
        """What Python has read of the whole batch, where that of its parts does not say it."""
        return self.sized(self.layout.total).reads if self.unsaid else None

    @cached_property
    def unsaid(self) -> Sequence[Read]:
        """What Python reads of which the parts do not say what it is for the whole batch."""
        layout, own = self.layout, self.sized(self.layout.each).reads
        if layout.parts == 1 or own is None:
            return ()
        least, wide = two_sizes(layout.least, layout.total)
        part, whole = self.sized(least).reads, self.sized(wide).reads
        if part is None or len(part.asked) != len(own.asked):
            return own.asked
        return unsaid(part, whole, self.sampled, least, wide)

    def sized(self, samples: int) -> Recording:
        """The recording for so many samples: a part and this rank's batch with their values."""
        if samples not in self.known:
            self.known[samples] = self._sized(samples)
        return self.known[samples]

    def _sized(self, samples: int) -> Recording:
        derived = self._derived(samples)
        if derived is not None and not CHECKED:
            self.derived.add(samples)
            return derived
        made = self._run(samples)
        assert derived is None or derived.graph == made.graph, "a part is not what was derived"
        return made

    def _run(self, samples: int) -> Recording:
        layout = self.layout
        if samples == layout.each:
            parts = split_batch(self.args, self.kwargs, layout.micro_batches, self.dims)
            return self._recorded(samples, *parts[0])
        if samples == layout.own:
            return self._recorded(samples, self.args, self.kwargs)
        return self._recorded(samples, *resized(self.args, self.kwargs, self.sampled, samples))

    def _derived(self, samples: int) -> Recording | None:
        """That of a part, by how the numbers of such forwards grow with the samples."""
        total, compared = self.layout.total, self.compared
        if not compared.growing or not 1 < samples < total:
            return None
        try:
            whole = self.sized(total)
        except RecordError:  # the parts' recordings say more of it
            return None
        if not _grows_evenly(whole):
            del self.known[total]  # it may ask less where it is told of its parts
            return None
        graph, specs = compared.part_of(whole.graph, samples, total), whole.graph.specs()
        for item in graph.inputs if graph is not None else ():
            shape = specs[Ref(item.name)].shape
            rows = self.sampled.get(item.target) if item.kind is InputKind.BATCH else None
            if item.spec.shape != (shape if rows is None else rows.sized(shape, samples)):
                return None
        return None if graph is None else replace(whole, graph=graph)

    def learn(self) -> None:
        """Notes how its numbers grow with the samples, for batches of other sizes."""
        layout = self.layout
        part, whole = self.known.get(layout.each), self.known.get(layout.total)
        if part is None or whole is None or layout.each == 1:
            return
        if layout.each in self.derived:
            return
        rest = [(r.outputs, r.structure, r.numbers, r.finite) for r in (part, whole)]
        if _grows_evenly(part) and _grows_evenly(whole) and rest[0] == rest[1]:
            self.compared.learn(part.graph, layout.each, whole.graph, layout.total)

    def _recorded(self, samples: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recording:
        layout, form = self.layout, (self.settling, signature(args, kwargs))
        if form in self.shared:
            return self.shared[form]
        # Once for each way is a second forward compared.
        repeated = not self.known and all(s is not self.settling for s, _ in self.shared)
        with torch.autocast("cpu", *autocast_of(self.device)):  # fake tensors are of the CPU
            try:
                first = self.known.get(layout.each)
                told = first.reads if first is not None else None
                made = record(
                    self.model, args, kwargs, self.dtype, told.answers if told else (),
                    settling=self.settling, repeated=repeated, compared=self.compared,
                )  # fmt: skip
            except ForwardError as error:
                if samples == layout.own or self._fails():
                    raise
                cause = error.__cause__ or error
                raise _other_size(samples, layout.own, self.taken, cause) from error
        graph = run_passes(RECORDED, made.everything)
        of_full = {"graph": without_aside(graph), "full": graph} if made.full else {"graph": graph}
        made = replace(made, **of_full)
        if made.reads is None:  # no value of the batch was asked for
            self.shared[form] = made
        return made

    def aside(self, part: Recording, found: Analysis | None) -> BatchAside:
        """What the forward does beside computing, of the whole batch; `found` is of its parts."""
        outputs = [o for o in part.everything.outputs if o.kind is OutputKind.ASIDE]
        known = known_values(found, outputs) if found else known_alone(part.everything, outputs)
        names = {o.name: known_name(o.ref) for o in outputs}
        edits = self.sized(self.layout.own).aside.edits if part.aside.edits else ()
        return BatchAside(known, names, part.aside.checks, part.aside.writes, edits)

    def _fails(self) -> bool:
        """Whether the forward fails for the batch as it was given."""
        try:
            record(self.model, self.args, self.kwargs, self.dtype)
        except ForwardError:
            return True
        except RecordError:
            return False
        return False


def _grows_evenly(made: Recording) -> bool:
    """Whether nothing but the samples' number tells a part of a forward from the whole of it."""
    asks = made.reads is not None or made.full is not None or bool(made.left)
    return not asks and not made.graph.functions


@contextlib.contextmanager
def telling(taken: str) -> Iterator[None]:
    """Adds to errors of other paths where samples were taken to stand."""
    try:
        yield
    except OtherPathError as error:
        raise RecordError(f"{error}; {taken}") from error


def two_sizes(least: int, total: int) -> tuple[int, int]:
    """The numbers of samples of the two recordings that are compared, for parts of `least`."""
    least = max(least, 2)
    return least, total if total > least else wide_of(total)


def wide_of(total: int) -> int:
    """A number of samples to compare two of them with, for a batch of `total`."""
    return total if total > 2 else 2 * total


def _other_size(samples: int, own: int, taken: str, error: BaseException) -> OtherSizeError:
    """The error for a forward that takes no other number of samples than the batch has."""
    return OtherSizeError(
        f"the forward takes the batch of {count_of(own, 'sample')}, and fails for {samples} of "
        f"them ({failure(error)}); {taken}; if the model is for one size of batch, train with dp=1 "
        "and micro_batches=1"
    )


def autocast_of(device: torch.device) -> tuple[torch.dtype, bool]:
    """The dtype of autocast on a device, and whether it is on."""
    return torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)


def surroundings(device: torch.device) -> tuple[Hashable, ...]:
    """What of torch's and Python's own state a forward may go by: autocast, whether gradients are
    on, the usual dtype, whether algorithms are deterministic, and how decimal numbers are rounded.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    usual = torch.is_grad_enabled(), torch.get_default_dtype()
    return autocast_of(device), *usual, deterministic, *decimal_settings().values()

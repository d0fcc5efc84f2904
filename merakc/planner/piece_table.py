"""The pieces of a model on one tp rank, for any degree of tp and any samples of a micro-batch.

A degree is sharded once, for two numbers of samples; those for others follow (`costs.scaled`), so
that thousands of layouts of a job are compared for a few recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from merakc.costs.work.pieces import Piece, cut_pieces, part_runs, part_starts
from merakc.costs.work.scaled import ODD_SAMPLES, SAMPLES, scaled
from merakc.errors import MerakError
from merakc.frontend.record import Recording
from merakc.ir.graph import Graph
from merakc.ir.layout import Layout
from merakc.ir.strategy import Form
from merakc.lowering.lowered import TRAINING, with_heads
from merakc.machines.cluster import Cluster, Device
from merakc.passes.autodiff.shorten import repeated, shorten
from merakc.passes.batches.recorded import BatchRecording, in_parts
from merakc.passes.forward.scaled_products import with_scaled_products
from merakc.passes.forward.scores import LEAST_BYTES
from merakc.passes.sharding.gather_products import gathers
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from merakc.passes.stages.stage import called
from merakc.planner.forms import experts_of

# The pieces of a model without repeated blocks; and the least of any, so that what few blocks there
# are can be spread over stages.
PLAIN = 64
FEWEST = 24
# A batch is in parts, whatever their number: what it couples runs once.
PARTS = 2


@dataclass
class PieceTable:
    """`record` gives the forward of a micro-batch of so many samples.

    `refused` has the forms that cannot be, and why. `couples` says whether the loss of a recording
    couples the samples of the batch.
    """

    record: Callable[[int], Recording]
    cluster: Cluster
    refused: dict[Form, MerakError] = field(default_factory=dict)
    couples: bool = False
    _splits: dict[tuple[int, bool], Mapping[str, Layout]] = field(default_factory=dict)
    _gathered: dict[tuple[int, bool], bool] = field(default_factory=dict)
    _ends: dict[tuple[Form, int], tuple[tuple[Piece, ...], ...]] = field(default_factory=dict)
    _short: dict[int, tuple[Graph, tuple[int, ...]]] = field(default_factory=dict)
    _known: dict[tuple[Form, int], tuple[Piece, ...]] = field(default_factory=dict)

    def on(self, cluster: Cluster) -> PieceTable:
        """The table for other machines: this one where they split the model alike."""
        forms = {*self.forms, *self.refused}
        same = all(_near(self.cluster, tp) == _near(cluster, tp) for tp, *_ in forms)
        return self if same else PieceTable(self.record, cluster, _short=self._short)

    @property
    def forms(self) -> list[Form]:
        """The forms that were cut."""
        return list(dict.fromkeys(form for form, _ in self._ends))

    @property
    def experts(self) -> int:
        """The most experts of a mixture, by the groups of its products; 0 where there is none."""
        try:
            return experts_of(self.record(SAMPLES[0]).graph)
        except MerakError:  # its forms tell of it
            return 0

    def pieces(self, form: Form, samples: int) -> tuple[Piece, ...]:
        """The pieces of a micro-batch. Raises the error of a form that cannot be."""
        if form in self.refused:
            raise self.refused[form]
        if (form, samples) not in self._known:
            try:
                self._known[form, samples] = self._make(form, samples)
            except MerakError as error:
                self.refused[form] = error
                raise
        return self._known[form, samples]

    def can_scale(self, form: Form, samples: int) -> bool:
        """Whether two recordings say of so many samples, so that none of these is needed."""
        if (form, samples) not in self._known:
            followed = self._follow(form, samples)
            if followed is None:
                return False
            self._known[form, samples] = followed
        return True

    def _make(self, form: Form, samples: int) -> tuple[Piece, ...]:
        pieces = self._follow(form, samples)
        return self._recorded(form, samples) if pieces is None else pieces

    def _follow(self, form: Form, samples: int) -> tuple[Piece, ...] | None:
        """The pieces by those of two recordings that are split like them: ranks of experts share
        the samples where these divide, else the sequences of each. None where none follow.
        """
        shared = form.cp if form.expert_parallel else 1
        unit, recorded = shared if samples % shared == 0 else 1, SAMPLES
        if unit < shared and any(n % shared == 0 for n in SAMPLES):
            recorded = ODD_SAMPLES
        if (form, unit) not in self._ends:
            self._ends[form, unit] = tuple(self._recorded(form, n * unit) for n in recorded)
        return scaled(self._ends[form, unit], samples // unit, recorded)

    def _recorded(self, form: Form, samples: int) -> tuple[Piece, ...]:
        short, counts = self._shortened(samples)
        graph, sharding = self._sharded(short, form)
        # Both recordings have all scores at once, or neither: what others need is in proportion.
        least_bytes = LEAST_BYTES * samples / min(samples, SAMPLES[0])
        local = called(spmd_partition(graph, sharding, 0), least_bytes)
        runs = PLAIN if len(counts) == 1 else -(-FEWEST // sum(counts))
        parts = part_runs(local, runs)
        assert len(parts) == len(counts), "blocks were lost where a graph was sharded"
        own = sharding.of_experts(graph)
        pieces = (
            replace(piece, experts=own.intersection(piece.parameters))
            for piece in cut_pieces(local, runs=runs)
        )
        runs_of = [[next(pieces) for _ in part] for part in parts]
        return tuple(piece for part in repeated(counts, runs_of) for piece in part)

    def _sharded(self, short: Graph, form: Form) -> tuple[Graph, Sharding]:
        """The graph as the ranks of tp share it, and how; of all samples alike."""
        parts = form.tp, form.expert_parallel
        graph = with_heads(short, parts[0], gathered=self._gathered.get(parts))
        cluster, splits = self.cluster.joining(form.tp), self._splits.get(parts)
        sharding = shard(graph, splits=splits, cluster=cluster, **form._asdict())
        self._gathered.setdefault(parts, gathers(graph))
        self._splits.setdefault(parts, sharding.tp_splits(graph))
        return graph, sharding

    def _shortened(self, samples: int) -> tuple[Graph, tuple[int, ...]]:
        if samples not in self._short:
            recording = self.record(samples)
            whole = isinstance(recording, BatchRecording) and recording.found is None
            split = with_scaled_products(in_parts(recording, 1 if whole else PARTS, TRAINING))
            graph, self.couples = split.graph, self.couples or split.head is not None
            self._short[samples] = shorten(graph, part_starts(graph))
        return self._short[samples]


def _near(cluster: Cluster, tp: int) -> tuple[Cluster, Device]:
    """What of machines decides how a model is split over so many neighbours."""
    return replace(cluster.joining(tp), hardware=None, name=""), cluster.described(tp).slowest

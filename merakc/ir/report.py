"""The Report: what a plan should cost and why, so that it can be shown without its model.

It stands in the plan's file and is no decision. All figures are of one simulated step. Where a rank
has a number, it is its place in the pipeline: dp and tp ranks of the same place do the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from merakc.ir.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Alternative:
    """A strategy that lost: what it should cost, and what `loses` it the comparison."""

    strategy: Strategy
    step_s: float
    peak_bytes: int
    loses: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """What cannot be: why, and what would have to change."""

    what: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The best of the others, the nearest first, and what was refused.

    They are compared by the costs of their pieces, by which a step of the chosen plan takes
    `chosen_s`; 0 where that is not known.
    """

    runners_up: tuple[Alternative, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    chosen_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CutReport:
    """How the stages were found: what METIS proposed, what refinement made of it, the bound.

    Loads are the largest stage's share of the work times the number of stages: 1.0 is even. Where
    the stages' devices differ it is the largest share of the work over the share of the speed.
    """

    winner: str
    load: float
    bound_load: float
    cut_bytes: int
    metis_load: float
    metis_cut_bytes: int
    metis_moves: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures of the whole step.

    `model_flops` are those of forward and backward on the whole batch, without what is computed
    again. `peak_flops_per_s` is the rate of all ranks together, which `peak_source` names.
    `peak_rank` has the least to spare of its `memory_bytes`, beside which `reserved_bytes` are not
    for tensors. `tokens` is 0 where the batch has none. `step_error` is the mean share by which
    predicted steps were off on such machines, 0 where none were measured. Devices wait for others
    in `waiting_share` of the step, and each draws `power_w` in the mean, 0 where nothing is known.
    """

    step_s: float
    bubble_share: float
    model_flops: int
    peak_flops_per_s: float
    peak_source: str
    peak_bytes: int
    peak_rank: int
    memory_bytes: int
    ranks: int
    samples: int
    tokens: int = 0
    step_error: float = 0.0
    reserved_bytes: int = 0
    waiting_share: float = 0.0
    power_w: float = 0.0

    @property
    def items(self) -> tuple[int, str]:
        """What a step trains on: its tokens, or its samples where the batch has none."""
        return (self.tokens, "tokens") if self.tokens else (self.samples, "samples")

    @property
    def items_per_s(self) -> float:
        """Of all devices together."""
        return self.items[0] / self.step_s if self.step_s else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B)."""
        return self.model_flops / (self.step_s * self.peak_flops_per_s) if self.step_s else 0.0

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return self.peak_bytes <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage on one tp rank: its trained and frozen elements, and a micro-batch's costs.

    The backward is whole, also where a schedule runs its halves apart. `device` is the kind that
    all its ranks are as fast as.
    """

    stage: int
    rank: int
    parameters: int
    parameter_bytes: int
    forward_s: float
    backward_s: float
    recompute_s: float
    saved_bytes: int
    device: str = ""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Where the seconds of a rank go; together they are the step.

    `exposed_s` waits for collectives over dp, `tied_s` adds up gradients of tied parameters.
    `waiting_s` waits for messages between the first and the last compute.
    """

    rank: int
    compute_s: float
    exposed_s: float
    tied_s: float
    warm_up_s: float
    waiting_s: float
    cool_down_s: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What the memory of a rank holds at its peak, while `action` runs.

    `gathered_bytes` are whole parameters of sharded ones. `activations_bytes` are what
    `in_flight` micro-batches have saved, `transient_bytes` what the action itself takes. Where
    ranks do not all have the memory of the verdict's, `limit_bytes` is this one's.

    An arena of `arena_bytes` has a place for all that a step makes; `bound_bytes` of it are needed
    at one moment. Both are 0 where no places were looked for.
    """

    rank: int
    action: str
    in_flight: int
    parameters_bytes: int
    gathered_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    activations_bytes: int
    messages_bytes: int
    transient_bytes: int
    limit_bytes: int = 0
    arena_bytes: int = 0
    bound_bytes: int = 0

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The parts with their names, from the lasting to the passing."""
        return (
            ("parameters", self.parameters_bytes),
            ("gathered", self.gathered_bytes),
            ("gradients", self.gradients_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("buffers", self.buffers_bytes),
            ("activations", self.activations_bytes),
            ("messages", self.messages_bytes),
            ("transient", self.transient_bytes),
        )

    @property
    def peak_bytes(self) -> int:
        """All of them."""
        return sum(size_bytes for _, size_bytes in self.parts)


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """Communication over one axis of `ranks` ranks, or with a rank's host, of the `rank` that takes
    longest for it.

    `sent_bytes` are those that it sends, or fetches from its host, `seconds` those of its links, of
    which it waits for `exposed_s`.
    """

    axis: Literal["tp", "cp", "ep", "cp x tp", "ep x tp", "pp", "dp", "dp x cp", "dp x ep", "host"]
    ranks: int
    what: str
    rank: int
    sent_bytes: int
    seconds: float
    exposed_s: float

    @property
    def hidden_share(self) -> float:
        """The part that runs beside something else."""
        return 1.0 - self.exposed_s / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Alike nodes: of the same call at the same line, in modules that differ in their indices.

    `count` of them run in a micro-batch. `seconds` are of a step, over all ranks of the pipeline,
    and `share` is their part of what these compute.
    """

    module: str
    op: str
    source: str
    layout: str
    count: int
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line that made nodes: their number, the layouts of their results, their share of time."""

    number: int
    function: str
    text: str
    layouts: tuple[str, ...]
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the user's, or of a library's, with the lines of it that made nodes."""

    path: str
    lines: tuple[SourceLine, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a kind of figures is from."""

    what: str
    origin: Literal["measured", "modelled"]
    how: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of the step, packed (`merakc.report.packing`).

    Of very long steps those in the middle are left out, which look like those around them.
    """

    packed: str
    left_out_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class HeadTimes:
    """What it costs that micro-batches wait for the whole batch, whose samples the loss couples.

    The step is `longer_s` longer, and the highest peak `more_bytes` higher, than if every
    micro-batch went on by itself; `head_s` of that couple the samples, once.
    """

    head_s: float
    longer_s: float
    more_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """What `merakc show` tells beside the decisions.

    `nodes` are those that take longest, of `node_count` kinds. `machines` is what the cluster was
    asked for by: a preset, or a path. `collectives` counts the tp collectives of one micro-batch,
    forward and backward; `exchanged` those calls, by "module at line", that have parts of heads
    where others have parts of a sequence, `rings` those to which keys and values are passed around;
    `cut` says how the stages were found.
    """

    cluster: str
    verdict: Verdict
    stages: tuple[StageTimes, ...]
    ranks: tuple[RankTimes, ...]
    memory: tuple[RankMemory, ...]
    traffic: tuple[AxisTraffic, ...]
    nodes: tuple[NodeTimes, ...]
    node_count: int
    files: tuple[SourceFile, ...]
    origins: tuple[Origin, ...]
    timeline: Timeline
    alternatives: Alternatives | None = None
    machines: str = ""
    head: HeadTimes | None = None
    collectives: dict[str, int] = field(default_factory=dict)
    exchanged: dict[str, int] = field(default_factory=dict)
    rings: dict[str, int] = field(default_factory=dict)
    cut: CutReport | None = None

    @property
    def limits_bytes(self) -> tuple[int, ...]:
        """The memory that each rank of `memory` has."""
        return tuple(m.limit_bytes or self.verdict.memory_bytes for m in self.memory)

"""Layouts of a GPT on a cluster, and the orders of work that each of them runs: how long a step is.

The orders are those of `merakc.schedules`, run on costs of stages from pieces (`costs`).
What follows the micro-batches, reducing gradients and the optimizer, is
`merakc.planner.estimate`'s.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

from benchmarks.gpt import Shape
from benchmarks.merak_ablation.costs import (
    block_seconds,
    even_time,
    in_backward,
    parted_costs,
    pieces_of,
    with_kept_blocks,
)
from merakc.batches.split import divisors
from merakc.costs.device import rank_place
from merakc.costs.fabric import message_seconds
from merakc.costs.pipeline_links import crossing
from merakc.costs.stages import even_stages, piece_cost
from merakc.errors import ConfigError
from merakc.ir.costs import StageCost
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.machines.cluster import Hardware
from merakc.passes.overlap.async_collectives import SLOWDOWN
from merakc.planner.estimate import estimate_step
from merakc.planner.job import Framework
from merakc.schedules.bound import lower_bound_s
from merakc.schedules.generate import generate
from merakc.schedules.placement import Placement, place
from merakc.schedules.registry import KNOWN
from merakc.schedules.timing import (
    Pipeline,
    make_pipeline,
    peak_bytes,
    run_orders,
    with_recomputation,
)
from merakc.schedules.work import RECOMPUTE, Work, encode

Orders = list[list[Work]]
# What a rank cannot use: CUDA's context, NCCL's buffers, workspaces of libraries, fragments.
RESERVED_BYTES = 1_500_000_000
# A pipeline that has filled holds no more than later on.
FILLED = 3  # micro-batches a rank
# In works scheduled: a few seconds.
EFFORT = 100_000
GENERATED = 1  # layouts that orders are generated for
PARTS = (0, 1, 2, 4)
OURS = ("1f1b", "merak", "zb-h1", "interleaved-1f1b", "zb-v", "v-half", "v-min")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained on: the cluster, sequences a step, and the degrees of tp that may be taken.

    With `whole_heads` tp divides the number of heads, as Megatron-LM asks for.
    """

    label: str
    hardware: Hardware
    batch: int
    tps: tuple[int, ...]
    whole_heads: bool = True

    @property
    def ranks(self) -> int:
        """All devices."""
        return len(self.hardware.devices)

    @property
    def capacity_bytes(self) -> int:
        """What a rank may hold."""
        return self.hardware.slowest.memory_bytes - RESERVED_BYTES


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is laid out; dp is what is left of the ranks.

    `parts` are those of a micro-batch, 0 where tp's collectives block. `ours` are layouts of this
    project: pipeline ranks are neighbours, stages are cut by time, gradients are reduced under the
    backward. In others, as in Megatron-LM, dp ranks are neighbours, stages have equal numbers of
    blocks, gradients are reduced at the end, and tp ranks share the messages between stages.
    """

    tp: int
    pp: int
    micro_batch: int
    parts: int = 0
    sequence_parallel: bool = False
    zero: bool = False
    ours: bool = False
    placement: Placement = "plain"
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class Laid:
    """A layout of a model with its pipeline, the blocks of each stage, and what follows it."""

    layout: Layout
    strategy: Strategy
    pipeline: Pipeline
    blocks: tuple[int, ...]
    after_s: float
    capacity_bytes: int

    @property
    def bound_s(self) -> float:
        """About the least that any order takes in this memory."""
        capacity_bytes = [self.capacity_bytes] * self.layout.pp
        return lower_bound_s(self.pipeline, capacity_bytes) + self.after_s


@dataclass(frozen=True, slots=True)
class Found:
    """The seconds of a step, the most that a rank holds, and what is run."""

    step_s: float
    laid: Laid
    peak_bytes: int
    how: str


@lru_cache(maxsize=1 << 14)
def lay_out(shape: Shape, setting: Setting, layout: Layout) -> Laid | None:
    """The layout in seconds and bytes; None where sizes do not divide."""
    tp, pp, b = layout.tp, layout.pp, layout.micro_batch
    dp, odd = divmod(setting.ranks, tp * pp)
    if odd or setting.batch % (dp * b) or pp * layout.chunks > shape.layers:
        return None
    if b % max(layout.parts, 1) or (setting.whole_heads and shape.heads % tp):
        return None
    if layout.zero and dp == 1:
        return None
    m = setting.batch // (dp * b)
    strategy = Strategy(dp, tp, pp, "pp" if layout.ours else "dp", micro_batches=m)
    pieces = pieces_of(shape, b, tp, sequence_parallel=layout.sequence_parallel)
    at = rank_place(setting.hardware, setting.ranks, tp)
    blocks = block_seconds(shape, b, at, layout.parts, sequence_parallel=layout.sequence_parallel)
    stages = even_stages(pieces, [], pp * layout.chunks)
    if layout.ours:
        block_s = blocks.forward.each_s + blocks.backward.each_s
        others = {k: piece_cost(pieces[k], at) for k in (0, len(pieces) - 1)}
        seconds = [
            others[k].forward_s + others[k].backward_s if k in others else block_s
            for k in range(len(pieces))
        ]
        stages = even_time(pieces, seconds, pp * layout.chunks)
    shards = StateShards(1, 1, dp) if layout.zero else StateShards()
    costs = parted_costs(pieces, stages, blocks, at, shards)
    share = 1 if layout.ours or layout.sequence_parallel else tp
    rank_of = place(layout.placement, pp, layout.chunks)
    far = crossing(strategy.mesh, at.fabric.ranks_per_node)
    links = [
        message_seconds(pieces[stage[-1]].handed_bytes / share, at.fabric, is_local=pair not in far)
        for stage, pair in zip(stages[:-1], pairwise(rank_of), strict=True)
    ]
    pipeline = make_pipeline(rank_of, costs, m, links)
    counts = tuple(sum(bool(pieces[k].path) for k in stage) for stage in stages)
    after_s = _after_s(shape, setting, replace(layout, parts=0, placement="plain", chunks=1))
    return Laid(layout, strategy, pipeline, counts, after_s, setting.capacity_bytes)


@lru_cache(maxsize=1 << 14)
def _after_s(shape: Shape, setting: Setting, layout: Layout) -> float:
    """Seconds of reducing gradients, of what is gathered again, and of the optimizer."""
    tp, pp = layout.tp, layout.pp
    dp = setting.ranks // (tp * pp)
    pieces = pieces_of(shape, layout.micro_batch, tp, sequence_parallel=layout.sequence_parallel)
    shards = StateShards(1, 1, dp) if layout.zero else StateShards()
    strategy = Strategy(dp, tp, pp, "pp" if layout.ours else "dp", state_shards=(shards,) * pp)
    framework = Framework(overlap=1 / SLOWDOWN if layout.ours else 0.0)
    estimate = estimate_step(pieces, strategy, setting.hardware, framework)
    return estimate.state_s + estimate.optimizer_s


@lru_cache(maxsize=1 << 10)
def known_orders(name: str, pp: int, micro_batches: int, chunks: int) -> Orders:
    """The orders of a known schedule."""
    return KNOWN[name].make(pp, micro_batches, chunks)


def timed(laid: Laid, orders: Orders, how: str) -> Found | None:
    """What a step takes in these orders; None where a rank has too little memory."""
    peak = max(peak_bytes(laid.pipeline, rank, order) for rank, order in enumerate(orders))
    if peak > laid.capacity_bytes:
        return None
    return Found(_end_s(laid.pipeline, orders) + laid.after_s, laid, peak, how)


def timed_known(
    laid: Laid,
    name: str,
    how: str,
    recomputed: Collection[int] = (),
    costs: Sequence[StageCost] | None = None,
) -> Found | None:
    """The same of a known schedule, with these stages recomputed, and perhaps other costs.

    The peak is that of the first micro-batches, which fill the pipeline.
    """
    pp, chunks, m = laid.layout.pp, laid.layout.chunks, laid.pipeline.micro_batches
    pipeline = replace(laid.pipeline, costs=tuple(costs or laid.pipeline.costs))
    few = min(m, FILLED * pp)
    short = replace(pipeline, micro_batches=few)
    orders = _recomputing(known_orders(name, pp, few, chunks), recomputed, few)
    peak = max(peak_bytes(short, rank, order) for rank, order in enumerate(orders))
    if peak > laid.capacity_bytes:
        return None
    orders = _recomputing(known_orders(name, pp, m, chunks), recomputed, m)
    return Found(_end_s(pipeline, orders) + laid.after_s, laid, peak, how)


def _recomputing(orders: Orders, stages: Collection[int], micro_batches: int) -> Orders:
    units = {s * micro_batches + j for s in stages for j in range(micro_batches)}
    return with_recomputation(orders, units) if units else orders


def _end_s(pipeline: Pipeline, orders: Orders) -> float:
    ends = run_orders(pipeline, orders)
    assert ends is not None, "a known schedule ran into a deadlock"
    return max(end[-1] for end in ends)


def fastest(found: Iterable[Found | None]) -> Found | None:
    """The one with the shortest step."""
    return min((f for f in found if f), key=lambda f: f.step_s, default=None)


def late(laid: Laid) -> Iterator[Found | None]:
    """1F1B as Megatron-LM has it: each block is recomputed in its backward."""
    costs = [in_backward(cost) for cost in laid.pipeline.costs]
    yield timed_known(laid, "1f1b", "1f1b, recomputed late", costs=costs)


def unrecomputed(laid: Laid) -> Iterator[Found | None]:
    """1F1B that keeps everything."""
    yield timed_known(laid, "1f1b", "1f1b, all kept")


def shifted(laid: Laid) -> Iterator[Found | None]:
    """Recomputed before the gradient is there, not on the last stage, the critical path shifted."""
    pp = laid.layout.pp
    for name, stages in (("merak", pp - 1), ("1f1b", pp - 1), ("1f1b", pp)):
        last = "" if stages == pp else ", none on the last stage"
        yield timed_known(laid, name, f"{name}, recomputed early{last}", range(stages))


def stage_aware(laid: Laid, *, whole_stages: bool = False) -> Iterator[Found | None]:
    """Each stage recomputes only as many of its blocks as its memory asks for.

    Before the gradient is there, for which the whole stage's activations must fit; or, unless
    `whole_stages`, each block in its backward.
    """
    for name, is_late in (("merak", False), ("1f1b", False), ("1f1b", True)):
        found = None if is_late and whole_stages else keep_most(laid, name, is_late=is_late)
        if found is not None:
            costs, recomputed, kept = found
            when = "late" if is_late else "early"
            how = f"recomputed {when}, {kept:.0%} of the blocks kept" if recomputed else "all kept"
            how = f"{name}, {how}"
            yield timed_known(laid, name, how, () if is_late else recomputed, costs)


def keep_most(
    laid: Laid, name: str, *, is_late: bool
) -> tuple[list[StageCost], list[int], float] | None:
    """The costs of stages that keep as many blocks as fit, those that recompute any, and the share
    of blocks that are kept; None where a stage fits in no way.
    """
    pp = laid.layout.pp
    m = min(laid.pipeline.micro_batches, FILLED * pp)
    short = replace(laid.pipeline, micro_batches=m)
    plain = known_orders(name, pp, m, 1)
    costs, recomputed, kept_blocks = [], [], 0
    for stage, (cost, blocks) in enumerate(zip(short.costs, laid.blocks, strict=True)):
        again = _recomputing(plain, [stage], m)[stage]

        def keeping(kept: int, cost: StageCost = cost, blocks: int = blocks) -> StageCost:
            own = with_kept_blocks(cost, blocks, kept)
            return in_backward(own) if is_late and kept < blocks else own

        def too_large(
            kept: int, stage: int = stage, blocks: int = blocks, again: list[Work] = again
        ) -> bool:
            own = (*short.costs[:stage], keeping(kept), *short.costs[stage + 1 :])
            order = plain[stage] if is_late or kept == blocks else again
            return peak_bytes(replace(short, costs=own), stage, order) > laid.capacity_bytes

        kept = bisect_left(range(blocks + 1), 1, key=too_large) - 1
        if kept < 0:
            return None
        costs.append(keeping(kept))
        kept_blocks += kept
        if kept < blocks:
            recomputed.append(stage)
    return costs, recomputed, kept_blocks / sum(laid.blocks)


def known(laid: Laid) -> Iterator[Found | None]:
    """Every known schedule of the layout's placement, nothing and everything recomputed."""
    layout = laid.layout
    for name in OURS:
        schedule = KNOWN[name]
        if schedule.placement == layout.placement and layout.chunks in schedule.virtual_stages:
            yield timed_known(laid, name, f"{name}, all kept")
            stages = range(laid.pipeline.stages)
            yield timed_known(laid, name, f"{name}, recomputed early", stages)
    if layout.placement == "plain":
        yield from stage_aware(laid, whole_stages=True)


def generated(many: Sequence[Laid]) -> Found | None:
    """An order that is made for one of these layouts, which differ in placement alone."""
    capacity_bytes = [many[0].capacity_bytes] * many[0].layout.pp
    try:
        made = generate([laid.pipeline for laid in many], capacity_bytes, effort=EFFORT)
    except ConfigError:  # nothing fits
        return None
    laid = next(laid for laid in many if laid.pipeline.rank_of == made.pipeline.rank_of)
    orders = encode(made.schedule)
    again = sum(kind == RECOMPUTE for order in orders for kind, _ in order)
    share = again / (laid.pipeline.stages * laid.pipeline.micro_batches)
    return timed(laid, orders, f"generated ({made.method}), {share:.0%} recomputed")


def layouts(setting: Setting, micro_batches: Sequence[int], parts: int = 0) -> Iterator[Layout]:
    """Those of a Megatron user: every degree of tp that may be taken, and of pp."""
    for tp in setting.tps:
        for pp in divisors(setting.ranks // tp):
            for b in micro_batches:
                yield Layout(tp, pp, b, parts if tp > 1 else 0)


def our_layouts(shape: Shape, setting: Setting, micro_batches: Sequence[int]) -> Iterator[Layout]:
    """Those of this project, each in as many parts as takes the blocks least time."""
    every: tuple[tuple[Placement, int], ...] = (
        ("plain", 1), ("v", 2), ("interleaved", 2), ("interleaved", 4),
    )  # fmt: skip
    for tp, b in product(setting.tps, micro_batches):
        for sequence_parallel in (False, True) if tp > 1 else (False,):
            parts = _best_parts(shape, setting, tp, b, sequence_parallel=sequence_parallel)
            own = Layout(tp, 1, b, parts, sequence_parallel, ours=True)
            for pp, zero in product(divisors(setting.ranks // tp), (False, True)):
                for placement, chunks in every if pp > 1 else every[:1]:
                    yield replace(own, pp=pp, zero=zero, placement=placement, chunks=chunks)


def _best_parts(
    shape: Shape, setting: Setting, tp: int, micro_batch: int, *, sequence_parallel: bool
) -> int:
    """The number of parts in which blocks take least time."""
    at = rank_place(setting.hardware, setting.ranks, tp)

    def block_s(parts: int) -> float:
        own = block_seconds(shape, micro_batch, at, parts, sequence_parallel=sequence_parallel)
        return own.forward.each_s + own.backward.each_s

    return min((n for n in PARTS if not micro_batch % max(n, 1)), key=block_s) if tp > 1 else 0


def our_best(shape: Shape, setting: Setting, micro_batches: Sequence[int]) -> Found | None:
    """The best plan over degrees, micro-batches, schedules, recomputation and parts."""
    free = replace(setting, tps=(1, 2, 4), whole_heads=False)
    every = {o: laid for o in our_layouts(shape, free, micro_batches)
             if (laid := lay_out(shape, free, o))}  # fmt: skip
    found: list[Found] = []
    best_s = float("inf")
    bounds_s = {o: laid.bound_s for o, laid in every.items()}
    for layout, laid in sorted(every.items(), key=lambda item: bounds_s[item[0]]):
        if bounds_s[layout] >= best_s:
            break
        own = fastest(known(laid))
        if own is not None:
            found.append(own)
            best_s = min(best_s, own.step_s)
    found.sort(key=lambda f: f.step_s)
    plain = [replace(f.laid.layout, placement="plain", chunks=1) for f in found]
    for layout in list(dict.fromkeys(plain))[:GENERATED]:
        both = [layout, replace(layout, placement="v", chunks=2)]
        many = [every[o] for o in both if o in every]
        made = generated(many) if layout.pp > 1 else None
        if made is not None:
            found.append(made)
    return fastest(found)

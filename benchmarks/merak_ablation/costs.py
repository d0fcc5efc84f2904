"""The stages of a GPT whose micro-batches run whole or in parts, from kernels by shape.

Parts are ordered by the list scheduler that orders the graphs of a real stage
(`merakc.passes.overlap.list_scheduling`): here its tasks are the kernels of a recorded part on a
device, and the collectives on links. Smaller products are less efficient, each part launches all of
its kernels anew, and what runs beside communication is slower.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from benchmarks.gpt import Shape, gpt_graph
from merakc.costs.device import OVERLAP_NORM, Place, collective_seconds, kernel_seconds
from merakc.costs.stages import PieceCost, piece_cost, stage_costs
from merakc.costs.work.kernels import Kernel, KernelKind, parts_work
from merakc.costs.work.pieces import NUMBERED, Piece, cut_pieces
from merakc.ir.costs import StageCost
from merakc.ir.graph import Graph, InputKind, Node
from merakc.ir.state import UNSHARDED, StateShards
from merakc.passes.overlap.async_collectives import LAGS, SLOWDOWN
from merakc.passes.overlap.list_scheduling import Task, list_schedule
from merakc.passes.stages.interval import least_largest_load

# The first and the last block differ from those between; two and three of these in a row show what
# one more takes.
RECORDED_LAYERS = 5
FIRST, FEW, MORE = 1, 2, 3
UNITS_PER_S = 10**9  # interval loads are integers


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds of blocks in a row: `each_s` for every block, `once_s` however many there are.

    At the ends of a row there is nothing to put beside a collective.
    """

    each_s: float
    once_s: float = 0.0

    def of(self, blocks: int) -> float:
        """The seconds of so many blocks."""
        return blocks * self.each_s + (self.once_s if blocks else 0.0)


@dataclass(frozen=True, slots=True)
class BlockSeconds:
    """What blocks take: forward, backward, and the halves of the backward."""

    forward: Span
    backward: Span
    input_grad: Span
    weight_grad: Span


@lru_cache(maxsize=4096)
def block_seconds(
    shape: Shape, micro_batch: int, place: Place, parts: int, *, sequence_parallel: bool = False
) -> BlockSeconds:
    """The blocks of a GPT for a micro-batch in so many parts; 0 for collectives that block.

    With one part, what does not wait for a collective runs beside it.
    """
    count = max(parts, 1)
    assert micro_batch % count == 0, f"{micro_batch} sequences do not divide into {count} parts"
    few = replace(shape, layers=RECORDED_LAYERS)
    graph = gpt_graph(few, micro_batch // count, place.tp or 1, sequence_parallel=sequence_parallel)
    return _Blocks(graph, place, parts).seconds()


@lru_cache(maxsize=1024)
def pieces_of(
    shape: Shape, micro_batch: int, tp: int, *, sequence_parallel: bool = False
) -> tuple[Piece, ...]:
    """The pieces of all layers, from the same recording as `block_seconds`."""
    few = replace(shape, layers=RECORDED_LAYERS)
    graph = gpt_graph(few, micro_batch, tp, sequence_parallel=sequence_parallel)
    before, first, middle, *_, last, after = cut_pieces(graph, fused=True)
    return before, first, *[middle] * (shape.layers - 2), last, after


class _Blocks:
    """The tasks of a part's blocks, forward and backward."""

    def __init__(self, graph: Graph, place: Place, parts: int) -> None:
        self.graph, self.place, self.parts = graph, place, parts
        starts: dict[int, int] = {}
        for k, node in enumerate(graph.nodes):
            if found := NUMBERED.match(node.module):
                starts.setdefault(int(found[2]), k)
        self.starts = starts
        self.place_of = {node.name: k for k, node in enumerate(graph.nodes)}
        self.works = parts_work(graph, self.place_of, len(graph.nodes))
        one = {node.name: 1 for node in self.nodes(1)}
        self.fused = parts_work(graph, one, 2, fused=True)[1]
        alone = parts_work(graph, one, 2)[1]
        # Nodes are priced one by one, as if nothing were fused: scaled to what is.
        self.scales = (
            _traffic_s(self.fused.forward, place) / _traffic_s(alone.forward, place),
            _traffic_s(self.fused.backward, place) / _traffic_s(alone.backward, place),
        )
        self.grads, self.readers = graph.grad_values(), graph.users()
        inputs = graph.inputs
        self.trained = {i.name for i in inputs if i.kind is InputKind.PARAMETER and i.requires_grad}

    def nodes(self, blocks: int) -> Sequence[Node]:
        """Those of so many blocks between the first and the last."""
        return self.graph.nodes[self.starts[FIRST] : self.starts[FIRST + blocks]]

    def seconds(self) -> BlockSeconds:
        launches = sum(self.fused.forward.values()), sum(self.fused.backward.values())
        weights = sum(map(self._has_weights, self.nodes(1)))
        return BlockSeconds(
            self._span(self.forward, launches[0]),
            self._span(lambda nodes: self.backward(nodes, "IW"), launches[1]),
            self._span(lambda nodes: self.backward(nodes, "I"), launches[1] - weights),
            self._span(lambda nodes: self.backward(nodes, "W"), weights),
        )

    def _span(self, tasks_of: Callable[[Sequence[Node]], list[Task]], launches: int) -> Span:
        """The seconds of tasks, with the host's for so many kernels of a block and a part."""
        few_s, more_s = (self._end_s(tasks_of(self.nodes(n))) for n in (FEW, MORE))
        each_s = (more_s - few_s) / (MORE - FEW)
        host_s = max(self.parts, 1) * launches * self.place.device.launch_s
        longer, shorter = max(each_s, host_s), min(each_s, host_s)
        together = float((1 + (shorter / longer) ** OVERLAP_NORM) ** (1 / OVERLAP_NORM))
        return Span(longer * together, max(0.0, few_s - FEW * each_s))

    def _end_s(self, tasks: Sequence[Task]) -> float:
        """When the last part has ended."""
        total_s = sum(t.compute_s + t.link_s for t in tasks)
        if not self.parts:
            return total_s
        everything = [
            Task(f"{t.name}@{j}", tuple(f"{name}@{j}" for name in t.after), t.compute_s, t.link_s)
            for j in range(self.parts)
            for t in tasks
        ]
        end_s, _ = list_schedule(everything, LAGS[0])
        hidden_s = self.parts * total_s - end_s
        return end_s + (SLOWDOWN - 1) * max(hidden_s, 0.0)

    def forward(self, nodes: Sequence[Node]) -> list[Task]:
        """One task a node."""
        found = []
        for node in nodes:
            work = self.works[self.place_of[node.name]]
            before = tuple(dict.fromkeys(r.node for r in node.refs))
            found.append(Task(node.name, before, *self._split(work.forward, self.scales[0])))
        return found

    def backward(self, nodes: Sequence[Node], halves: str) -> list[Task]:
        """One task a node in reverse, and one for the weights of those that have some; of the
        halves that are asked for, input and weight gradients.
        """
        made: set[str] = set()
        found = []
        for node in reversed(nodes):
            if not node.grad_outputs(self.grads):
                continue
            after = tuple(n.name for n in self.readers[node.name] if n.name in made)
            made.add(node.name)
            work = self.works[self.place_of[node.name]]
            compute_s, link_s = self._split(work.backward, self.scales[1])
            if self._has_weights(node):
                compute_s /= 2  # two products of equal FLOPs
                if "W" in halves:
                    found.append(Task(f"{node.name} weights", after, compute_s, 0.0))
            if "I" in halves:
                found.append(Task(node.name, after, compute_s, link_s))
        return found

    def _has_weights(self, node: Node) -> bool:
        """Whether the node is a product with trained weights."""
        kernels = self.works[self.place_of[node.name]].forward
        product = any(k.kind is KernelKind.PRODUCT for k in kernels)
        return product and any(ref.node in self.trained for ref in node.refs)

    def _split(self, kernels: Mapping[Kernel, int], scale: float) -> tuple[float, float]:
        """Seconds of the device and of the links."""
        compute_s = link_s = 0.0
        for kernel, count in kernels.items():
            if kernel.kind is KernelKind.COLLECTIVE:
                place = self.place
                link_s += count * collective_seconds(kernel, place)
            else:
                plain = scale if kernel.kind is KernelKind.TRAFFIC else 1.0
                compute_s += count * plain * kernel_seconds(kernel, self.place.device)
        return compute_s, link_s


def _traffic_s(kernels: Mapping[Kernel, int], place: Place) -> float:
    """Seconds of the kernels that are bound by memory."""
    return sum(
        count * kernel_seconds(kernel, place.device)
        for kernel, count in kernels.items()
        if kernel.kind is KernelKind.TRAFFIC
    )


def parted_costs(
    pieces: Sequence[Piece],
    stages: Sequence[Sequence[int]],
    blocks: BlockSeconds,
    place: Place,
    shards: StateShards = UNSHARDED,
) -> tuple[StageCost, ...]:
    """The cost of each stage, of the pieces at the places that it has, with blocks of such seconds.

    Embedding and head run whole. Half of what is saved is taken for deferred to the weights'
    gradients. The gradient of what is no block (of the logits) takes as much as what it saves.
    """
    known = {id(p): piece_cost(p, place) for p in {id(p): p for p in pieces if not p.path}.values()}
    block = PieceCost(blocks.forward.each_s, blocks.backward.each_s)
    costs = [known.get(id(piece), block) for piece in pieces]
    found = []
    for stage, cost in zip(stages, stage_costs(pieces, costs, stages, place, shards=shards),
                           strict=True):  # fmt: skip
        count = sum(bool(pieces[k].path) for k in stage)
        rest = [k for k in stage if not pieces[k].path]
        rest_s = sum(costs[k].backward_s for k in rest)
        added_s = cost.backward_s - sum(costs[k].backward_s for k in stage)
        once_s = blocks.forward.of(count) - count * block.forward_s
        found.append(
            replace(
                cost,
                forward_s=cost.forward_s + once_s,
                backward_s=blocks.backward.of(count) + rest_s + added_s,
                recompute_s=blocks.forward.of(count),
                input_grad_s=blocks.input_grad.of(count) + rest_s / 2,
                weight_grad_s=blocks.weight_grad.of(count) + rest_s / 2 + added_s,
                deferred_bytes=cost.saved_bytes // 2,
                backward_peak_bytes=max((pieces[k].saved_bytes for k in rest), default=0),
            )
        )
    return tuple(found)


def in_backward(cost: StageCost) -> StageCost:
    """The cost where each block is recomputed right before its own backward, by checkpoints as
    they are found in frameworks: late, and with one block's activations at a time.
    """
    return replace(
        cost,
        backward_s=cost.backward_s + cost.recompute_s,
        recompute_s=0.0,
        saved_bytes=cost.checkpoint_bytes,
        backward_peak_bytes=max(cost.backward_peak_bytes, cost.recompute_peak_bytes),
    )


def with_kept_blocks(cost: StageCost, blocks: int, kept: int) -> StageCost:
    """The cost where so many of a stage's blocks are not recomputed."""
    share = (blocks - kept) / blocks if blocks else 0.0
    freed = share * (cost.saved_bytes - cost.checkpoint_bytes)
    return replace(
        cost, recompute_s=share * cost.recompute_s, checkpoint_bytes=cost.saved_bytes - int(freed)
    )


def even_time(pieces: Sequence[Piece], seconds: Sequence[float], stages: int) -> list[list[int]]:
    """The places of the pieces of each stage, so that the longest is as short as can be."""
    loads = [max(1, round(s * UNITS_PER_S)) for s in seconds]
    load = least_largest_load(loads, stages)
    prefix = [0, *accumulate(loads)]
    found, start = [], 0
    for left in reversed(range(stages)):
        end = bisect_right(prefix, prefix[start] + load) - 1
        end = max(start + 1, min(end, len(pieces) - left))
        found.append(list(range(start, end)))
        start = end
    return found

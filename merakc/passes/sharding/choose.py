"""Chooses the factors that are split over the tp axis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from merakc.costs.device import place_on, traffic_seconds
from merakc.costs.fabric import all_gather_seconds, all_reduce_seconds
from merakc.costs.nodes import divided_seconds
from merakc.errors import PlanError, ShardError
from merakc.files.printable import count_of
from merakc.ir.graph import Input, InputKind, Node, Ref
from merakc.ir.layout import DimFactor, Layout
from merakc.kernels.draws import KEY_POSITION
from merakc.kernels.opaque import OPAQUE
from merakc.machines.cluster import Cluster
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.factors import Dim, Factor, atoms, leaves, segments_of
from merakc.passes.sharding.rows import Along
from merakc.passes.sharding.rules import GATHERED, row_of

# Forward and backward together cost three forwards, and each tp collective of the forward has its
# conjugate in the backward (Megatron-LM, arXiv 1909.08053, section 3).
PASSES = 3
# What a parameter's bytes cost, in reads or writes a micro-batch: a step of Adam reads and writes
# parameter, gradient and two numbers of state, and a step has a few micro-batches.
PARAMETER_TRAFFIC = 4
MAX_REASONS = 4  # that an error names
VOCABULARY_OPS = ("aten.embedding.default", "aten.cross_entropy_loss.default")


# Small models are worth no communication, but whoever asks for tp is to have it: what the cluster's
# figures leave whole is split as in a larger model, 16 FLOPs to a byte of the link, and where that
# splits nothing either, at any price.
LIKE_LARGE = Cluster(
    "no machine",
    16.0,
    16.0,
    op_overhead_s=0.0,
    memory_bytes=0,
    link_latency_s=0.0,
    link_bytes_per_s=1.0,
)
AT_ANY_PRICE = replace(LIKE_LARGE, link_bytes_per_s=math.inf)


@dataclass(slots=True)
class Candidate:
    """A factor that could be split: seconds of a forward that ranks then share, those of moving
    its parameters once, and those of the collectives of a forward and a backward.
    """

    factor: Factor
    work_s: float = 0.0
    parameters_s: float = 0.0
    wire_s: float = 0.0
    rivals: set[Factor] = field(default_factory=set)

    def gain_s(self, tp: int) -> float:
        """Seconds of a micro-batch, forward and backward, that splitting the factor saves."""
        shared_s = PASSES * self.work_s + PARAMETER_TRAFFIC * self.parameters_s
        return (1 - 1 / tp) * shared_s - self.wire_s


def node_factors(dims: Dims, node: Node) -> set[Factor]:
    """Every factor of the node's arguments and outputs."""
    refs = [*node.refs, *(Ref(node.name, k) for k, o in enumerate(node.outputs) if o is not None)]
    return {f for ref in refs for dim in dims.of[ref] for f in atoms(dim)}


def _open_factors(dims: Dims, tp: int) -> Iterator[tuple[Input, Factor]]:
    """The parameters with each of their factors that no rule keeps from being split in `tp`."""
    for item in dims.graph.inputs:
        if item.kind is InputKind.PARAMETER:
            for factor in dict.fromkeys(f for dim in dims.of[Ref(item.name)] for f in atoms(dim)):
                if not factor.blocked and factor.size >= tp:
                    yield item, factor


def may_be_split(dims: Dims, tp: int) -> bool:
    """Whether there are `candidates`, whatever they cost."""
    return not refused_factors(dims).issuperset(factor for _, factor in _open_factors(dims, tp))


def candidates(dims: Dims, tp: int, cluster: Cluster) -> dict[Factor, Candidate]:
    """The factors of parameters that may be split in `tp` parts, with what they save and cost."""
    graph, place = dims.graph, place_on(cluster, tp)
    specs, group, fabric = graph.specs(), place.group("tp"), place.fabric
    found: dict[Factor, Candidate] = {}
    for item, factor in _open_factors(dims, tp):
        candidate = found.setdefault(factor, Candidate(factor))
        candidate.parameters_s += traffic_seconds(item.spec.size_bytes, place.device)
        candidate.rivals |= _others(dims.of[Ref(item.name)], factor)
    grads = graph.grad_values()
    entered: set[tuple[Ref, Factor]] = set()
    for node in graph.nodes:
        here = [f for f in node_factors(dims, node) if f in found]
        for a, b in combinations(here, 2):
            found[a].rivals.add(b)
            found[b].rivals.add(a)
        summed = {f for dim in dims.summed.get(node.name, ()) for f in atoms(dim)}
        work_s = divided_seconds(node, specs, place) if here else 0.0
        for factor in here:
            candidate = found[factor]
            if not _is_cut_off(dims, node, factor):
                candidate.work_s += work_s
            if factor in summed:
                candidate.wire_s += all_reduce_seconds(_sum_bytes(node), group, fabric)
            if node.op == GATHERED and factor in atoms(dims.of[node.args[0]][node.args[1]]):
                candidate.wire_s += all_gather_seconds(node.spec.size_bytes, group, fabric)
            for ref in node.refs:
                own = {f for dim in dims.of[ref] for f in atoms(dim)}
                if ref in grads and factor not in own and (ref, factor) not in entered:
                    entered.add((ref, factor))
                    candidate.wire_s += all_reduce_seconds(specs[ref].size_bytes, group, fabric)
    for factor in refused_factors(dims):
        found.pop(factor, None)
    return found


def _is_cut_off(dims: Dims, node: Node, factor: Factor) -> bool:
    """Whether the node is computed whole, and its result then cut."""
    row = row_of(node.op)
    read = (f for ref in node.refs for dim in dims.of[ref] for f in atoms(dim))
    return isinstance(row, Along) and row.cut and factor not in read


def refused_factors(dims: Dims) -> set[Factor]:
    """The factors that no rule blocks, and that cannot be split all the same."""
    found = uneven_factors(dims) | repeated_factors(dims)
    return found | _scattered_rows(dims) | _scattered_draws(dims)


def _scattered_draws(dims: Dims) -> set[Factor]:
    """The factors that lie across the array by which a draw is keyed, or are a part of its samples:
    a shard of one would be no block of that array.
    """
    found: set[Factor] = set()
    for node in dims.graph.nodes:
        if node.op not in KEY_POSITION:
            continue
        sample, _, _, sizes = node.args[KEY_POSITION[node.op] + 1 :][:4]
        k, left = 0, sizes[0]
        for factor in (f for dim in dims.of[Ref(node.name)] for f in leaves(dim)):
            while left == 1 and k + 1 < len(sizes):
                k, left = k + 1, sizes[k + 1]
            across, size = left % factor.size != 0, factor.size
            if across or (k == sample and size != sizes[k]):
                found.update(atoms([factor]))
            while size > left:
                size, k, left = size // left, k + 1, sizes[k + 1]
            left //= size
    return found


def _scattered_rows(dims: Dims) -> set[Factor]:
    """The factors of vocabularies of which a shard's rows would not be consecutive."""
    return {
        factor
        for node in dims.graph.nodes
        if node.op in VOCABULARY_OPS
        for dim in dims.summed.get(node.name, ())
        if not _is_plain(dim)
        for factor in atoms(dim)
    }


def _is_plain(dim: Dim) -> bool:
    """Whether a rank's part of the dim is one block."""
    own = leaves(dim)
    return len(own) <= 1 and not any(f.segments for f in own)


def repeated_factors(dims: Dims) -> set[Factor]:
    """The factors that two dims of one value share, as in the weight of a recurrence, h x h.

    Split, they would leave each rank a block of the diagonal.
    """
    found: set[Factor] = set()
    for own in dims.of.values():
        times = Counter(f for dim in own for f in set(atoms(dim)))
        found.update(f for f, count in times.items() if count > 1)
    return found


def uneven_factors(dims: Dims) -> set[Factor]:
    """The factors of only some of the segments of a dim.

    The other segments would be whole on every rank, and added up as often. Random numbers
    are drawn for one block, so that the segments of its dims stay whole too.
    """
    draws = {n.name for n in dims.graph.nodes if n.op in KEY_POSITION}
    found: set[Factor] = set()
    for ref, own in dims.of.items():
        segmented = [f for dim in own for f in leaves(dim) if f.segments]
        for factor in segmented:
            found |= _not_in_all([set(atoms(s)) for s in segments_of(factor)])
        if ref.node in draws:
            found.update(atoms(segmented))
    return found


def _not_in_all(sets: list[set[Factor]]) -> set[Factor]:
    return set[Factor]().union(*sets) - sets[0].intersection(*sets[1:])


def _others(dims: list[Dim], factor: Factor) -> set[Factor]:
    return {f for dim in dims for f in atoms(dim)} - {factor}


def _sum_bytes(node: Node) -> int:
    """What the all-reduce of a partial sum moves; a cross-entropy reduces three numbers a row."""
    if node.op == "aten.cross_entropy_loss.default":
        return 3 * node.spec.dtype.itemsize
    return sum(o.size_bytes for o in node.outputs if o is not None)


def choose(dims: Dims, tp: int, cluster: Cluster) -> set[Factor]:
    """The set of factors that saves most seconds, no two of which meet in one op: a weighted
    packing, solved exactly; then, among what is left, the best that would pay in a larger model.

    Raises `ShardError` where no dim of any parameter can be split in `tp` parts.
    """
    if tp == 1:
        return set()
    chosen: set[Factor] = set()
    for prices in (cluster, LIKE_LARGE, AT_ANY_PRICE):
        if prices is AT_ANY_PRICE and chosen:
            break
        found = candidates(dims, tp, prices)
        if not found:
            raise ShardError(_refusal(dims, tp))
        free = [c for c in found.values() if c.factor not in chosen and not c.rivals & chosen]
        gains_s = {c.factor: c.gain_s(tp) for c in free}
        chosen |= _packed([c for c in free if gains_s[c.factor] > 0], gains_s)
    return chosen


def _packed(priced: list[Candidate], gains_s: Mapping[Factor, float]) -> set[Factor]:
    """The candidates without a rival among them that together gain most (MILP)."""
    if not priced:
        return set()
    # Here, since only what splits needs it: a sixth of a second of `import merakc`.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    index = {c.factor: k for k, c in enumerate(priced)}
    pairs = sorted(
        {tuple(sorted((index[c.factor], index[r]))) for c in priced for r in c.rivals if r in index}
    )
    constraints = []
    if pairs:
        rows = [k for k, pair in enumerate(pairs) for _ in pair]
        columns = [c for pair in pairs for c in pair]
        matrix = coo_array((np.ones(len(rows)), (rows, columns)), (len(pairs), len(priced)))
        constraints.append(LinearConstraint(matrix.tocsr(), ub=1))
    gains = np.array([gains_s[c.factor] for c in priced])
    result = milp(
        -gains / gains.max(),
        integrality=np.ones(len(priced)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    assert result.x is not None, result.message
    return {c.factor for c, x in zip(priced, result.x, strict=True) if x > 0.5}


def _refusal(dims: Dims, tp: int) -> str:
    """Why nothing can be split: the largest degree that can be, or what needs the dims whole."""
    parameters = [i for i in dims.graph.inputs if i.kind is InputKind.PARAMETER]
    if not parameters:
        return f"tp={tp}: the forward reads no parameter, so that nothing can be split; use tp=1"
    sizes = {f.size for f in candidates(dims, 2, LIKE_LARGE)}
    if sizes:
        return (
            f"tp={tp}: the largest dim that can be split has {count_of(max(sizes), 'part')} "
            f"(heads, columns or rows of the vocabulary); use tp={max(sizes)} or less"
        )
    reasons = Counter(
        f.blocked for i in parameters for dim in dims.of[Ref(i.name)] for f in atoms(dim)
    )
    worst = "; ".join(why for why, _ in reasons.most_common(MAX_REASONS))
    return f"tp={tp}: no parameter can be split, its dims are needed whole by {worst}; use tp=1"


# Of modules that ask for the values of tensors, and so run whole.
_ASKING = (
    "; of a batch norm with momentum=None, as torch.optim.swa_utils.update_bn sets it: in place of "
    "that, reset_running_stats() of each, and under torch.no_grad() model(batch) of each batch, "
    "with momentum 1.0, 1/2, 1/3, ... of each norm"
)


def factors_of(dims: Dims, splits: Mapping[str, Layout]) -> set[Factor]:
    """The factors that a plan's layouts of parameters and buffers split.

    Raises `PlanError` where the graph does not divide a dim the way that the plan does, or needs
    one whole.
    """
    found = planned_factors(dims, splits)
    whys = [f.blocked or "another part of a value" for f in needed_whole(dims, found)]
    if blocked := ", ".join(dict.fromkeys(whys)):
        asking = "" if OPAQUE not in blocked else _ASKING
        raise PlanError(
            f"the plan splits a dim that this graph needs whole, for {blocked}: the forward does "
            "something else than when the plan was made (another mode, other settings of modules); "
            "call it as then, plan with tp=1, or compute this in one process on the weights of "
            f"model.full_state_dict(){asking}"
        )
    return found


def needed_whole(dims: Dims, factors: Collection[Factor]) -> list[Factor]:
    """Those of the factors that cannot be split."""
    refused = refused_factors(dims)
    return [f for f in factors if f.blocked or f in refused]


def planned_factors(dims: Dims, splits: Mapping[str, Layout]) -> set[Factor]:
    """The factors that a plan's layouts split, whether they can be split here or not.

    Raises `PlanError` where the graph does not divide a dim the way that the plan does.
    """
    found: set[Factor] = set()
    for item in dims.graph.inputs:
        planned = splits.get(item.target)
        if planned is None or item.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            continue
        if planned.shape != item.spec.shape:
            raise PlanError(
                f"the plan splits '{item.target}' of shape {planned.shape}, "
                f"the model has {item.spec.shape}"
            )
        for dim, factors in zip(dims.of[Ref(item.name)], planned.dims, strict=True):
            found |= split_of(dim, factors, item.target)
    return found


def split_of(dim: Dim, planned: tuple[DimFactor, ...], target: str, ranks: int = 0) -> set[Factor]:
    """The factors of a dim that a layout splits; for so many ranks, where they are given, a factor
    of as many equal parts is as good as a larger one.
    """
    found: set[Factor] = set()
    outer = 1
    for part in planned:
        if part.split:
            factor = _factor_at(dim, outer, part.size, target, ranks)
            if not part.segments:
                found.add(factor)
            for own, inner in zip(segments_of(factor), part.segments, strict=False):
                found |= split_of(own, inner, target, ranks)
        outer *= part.size
    return found


def _factor_at(dim: Dim, outer: int, full: int, target: str, ranks: int) -> Factor:
    before = 1
    for factor in leaves(dim):
        is_part = 0 < ranks == factor.size and full % ranks == 0
        if before == outer and (factor.size == full or is_part):
            return factor
        before *= factor.size
    raise PlanError(f"the plan splits '{target}' at a factor of {full} that the graph lacks")

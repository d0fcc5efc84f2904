"""Chooses the factors that are split over the tp axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from merakc.costs.flops import node_flops
from merakc.errors import PlanError, ShardError
from merakc.ir.graph import InputKind, Node, Ref
from merakc.ir.layout import DimFactor, Layout
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.dims import Dims
from merakc.passes.factors import Dim, Factor, atoms, leaves, segments_of

# FLOPs that a rank does in the time of moving one byte over the tp axis. A low figure: whoever
# asks for tp has decided to pay for communication, and this decides only where it is spent.
FLOPS_PER_BYTE = 16
# Forward and backward together cost three forwards, and each tp collective of the forward has its
# conjugate in the backward (Megatron-LM, arXiv 1909.08053, section 3).
PASSES = 3
# A parameter's gradient and update move its bytes a few times a step, an activation travels once a
# micro-batch, and a step has a few of them: byte for byte they weigh the same.
PARAMETER_TRAFFIC = 1
# What the latency of a collective is worth: 2 to 20 microseconds on links of 50 to 450 GB/s.
COLLECTIVE_BYTES = 1 << 20
MAX_REASONS = 4  # that an error names
VOCABULARY_OPS = ("aten.embedding.default", "aten.cross_entropy_loss.default")


@dataclass(frozen=True, slots=True)
class Price:
    """What communication costs, in bytes: a byte, and a collective whatever its size."""

    byte: float
    collective: float


# Tried in turn until something is worth splitting: small models are worth neither the latency nor
# perhaps the bytes, but whoever asks for tp is to have it.
PRICES = (Price(1, COLLECTIVE_BYTES), Price(1, 0), Price(0, 0))


@dataclass(slots=True)
class Candidate:
    """A factor that could be split, and what that saves and costs a micro-batch."""

    factor: Factor
    flops: int = 0
    parameter_bytes: int = 0
    wire_bytes: int = 0
    collectives: int = 0
    rivals: set[Factor] = field(default_factory=set)

    def gain(self, tp: int, price: Price) -> float:
        """Saved work less communication, in bytes of the tp link."""
        saved = 1 - 1 / tp
        work = PASSES * self.flops / FLOPS_PER_BYTE + PARAMETER_TRAFFIC * self.parameter_bytes
        wire = 2 * price.byte * saved * self.wire_bytes  # a ring all-reduce moves them twice
        return saved * work - wire - price.collective * self.collectives


def node_factors(dims: Dims, node: Node) -> set[Factor]:
    """Every factor of the node's arguments and outputs."""
    refs = [*node.refs, *(Ref(node.name, k) for k, o in enumerate(node.outputs) if o is not None)]
    return {f for ref in refs for dim in dims.of[ref] for f in atoms(dim)}


def candidates(dims: Dims, tp: int) -> dict[Factor, Candidate]:
    """The factors of parameters that may be split in `tp` parts, priced."""
    graph = dims.graph
    specs = graph.specs()
    found: dict[Factor, Candidate] = {}
    for item in graph.inputs:
        if item.kind is not InputKind.PARAMETER:
            continue
        for factor in dict.fromkeys(f for dim in dims.of[Ref(item.name)] for f in atoms(dim)):
            if not factor.blocked and factor.size >= tp:
                candidate = found.setdefault(factor, Candidate(factor))
                candidate.parameter_bytes += item.spec.size_bytes
                candidate.rivals |= _others(dims.of[Ref(item.name)], factor)
    grads = graph.grad_values()
    entered: set[tuple[Ref, Factor]] = set()
    for node in graph.nodes:
        here = [f for f in node_factors(dims, node) if f in found]
        for a, b in combinations(here, 2):
            found[a].rivals.add(b)
            found[b].rivals.add(a)
        summed = {f for dim in dims.summed.get(node.name, ()) for f in atoms(dim)}
        flops = node_flops(node, specs) if here else 0
        for factor in here:
            candidate = found[factor]
            candidate.flops += flops
            if factor in summed:
                candidate.wire_bytes += _sum_bytes(node)
                candidate.collectives += 1
            for ref in node.refs:
                own = {f for dim in dims.of[ref] for f in atoms(dim)}
                if ref in grads and factor not in own and (ref, factor) not in entered:
                    entered.add((ref, factor))
                    candidate.wire_bytes += specs[ref].size_bytes
                    candidate.collectives += 1
    for factor in uneven_factors(dims) | repeated_factors(dims):
        found.pop(factor, None)
    for node in graph.nodes:
        if node.op in VOCABULARY_OPS:
            for dim in dims.summed.get(node.name, ()):
                if not _is_plain(dim):  # rows of a shard would not be consecutive
                    for factor in atoms(dim):
                        found.pop(factor, None)
    return found


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


def choose(dims: Dims, tp: int) -> set[Factor]:
    """The best set of factors no two of which meet in one op: an exact weighted packing (MILP).

    Raises `ShardError` where no dim of any parameter can be split in `tp` parts.
    """
    if tp == 1:
        return set()
    found = list(candidates(dims, tp).values())
    if not found:
        raise ShardError(_refusal(dims, tp))
    for price in PRICES:
        gains = {c.factor: c.gain(tp, price) for c in found}
        priced = [c for c in found if gains[c.factor] > 0]
        if priced:
            break
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
    result = milp(
        -np.array([gains[c.factor] for c in priced]),
        integrality=np.ones(len(priced)),
        bounds=Bounds(0, 1),
        constraints=constraints,
    )
    assert result.x is not None, result.message
    return {c.factor for c, x in zip(priced, result.x, strict=True) if x > 0.5}


def _refusal(dims: Dims, tp: int) -> str:
    """Why nothing can be split: the largest degree that can be, or what needs the dims whole."""
    parameters = [i for i in dims.graph.inputs if i.kind is InputKind.PARAMETER]
    if not parameters:
        return f"tp={tp}: the forward reads no parameter, so that nothing can be split; use tp=1"
    sizes = {f.size for f in candidates(dims, 2)}
    if sizes:
        return (
            f"tp={tp}: the largest dim that can be split has {max(sizes)} parts (heads, columns "
            f"or rows of the vocabulary); use tp={max(sizes)} or less"
        )
    reasons = Counter(
        f.blocked for i in parameters for dim in dims.of[Ref(i.name)] for f in atoms(dim)
    )
    worst = "; ".join(why for why, _ in reasons.most_common(MAX_REASONS))
    return f"tp={tp}: no parameter can be split, its dims are needed whole by {worst}; use tp=1"


def factors_of(dims: Dims, splits: Mapping[str, Layout]) -> set[Factor]:
    """The factors that a plan's layouts of parameters and buffers split.

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
            found |= _split_of(dim, factors, item.target)
    blocked = [f.blocked for f in found if f.blocked]
    if blocked:
        raise PlanError(f"the plan splits a dim that this graph needs whole, for {blocked}")
    return found


def _split_of(dim: Dim, planned: tuple[DimFactor, ...], target: str) -> set[Factor]:
    """The factors of a dim that a layout splits."""
    found: set[Factor] = set()
    outer = 1
    for part in planned:
        if part.split:
            factor = _factor_at(dim, outer, part.size, target)
            if not part.segments:
                found.add(factor)
            for own, inner in zip(segments_of(factor), part.segments, strict=False):
                found |= _split_of(own, inner, target)
        outer *= part.size
    return found


def _factor_at(dim: Dim, outer: int, full: int, target: str) -> Factor:
    before = 1
    for factor in leaves(dim):
        if before == outer and factor.size == full:
            return factor
        before *= factor.size
    raise PlanError(f"the plan splits '{target}' at a factor of {full} that the graph lacks")

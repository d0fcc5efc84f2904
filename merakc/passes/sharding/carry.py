"""What is split over tp, carried to the graph of a rank of cp."""

from __future__ import annotations

import torch

from merakc.errors import PlanError
from merakc.ir.graph import Graph, OutputKind, Ref
from merakc.ir.layout import Layout
from merakc.passes.sharding.choose import needed_whole, split_of
from merakc.passes.sharding.factors import Factor
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.shard import sharding_of

# Outputs that others read as the whole graph's sharding says: other stages, the next step.
AGREED = (OutputKind.ACTIVATION, OutputKind.BUFFER)


def carried(graph: Graph, sharding: Sharding, part: Graph) -> Sharding:
    """The sharding over tp of `part`, the graph of a rank of cp: what tp splits of the inputs of
    the whole `graph` follows through it.

    Raises `PlanError` where both axes split one dim, where the part needs whole what tp splits, and
    where what other stages are to read comes out in other parts than they take it for.
    """
    dims, inputs = propagate(part), {i.name: i for i in graph.inputs}
    axis = "ep" if sharding.context is not None and sharding.context.has_experts else "cp"
    chosen: dict[Factor, str] = {}  # with what is split so
    for item in part.inputs:
        whole = inputs.get(item.name)
        if whole is None:  # a constant of the part's own
            continue
        sizes = zip(item.spec.shape, whole.spec.shape, strict=True)
        for k, (factors, (own, full)) in enumerate(
            zip(sharding.layouts[Ref(item.name)].dims, sizes, strict=True)
        ):
            if any(f.split for f in factors):
                if own != full:
                    raise _both(axis, f"dim {k} of '{item.target or item.name}'")
                dim = dims.of[Ref(item.name)][k]
                own_factors = split_of(dim, factors, item.target, sharding.tp)
                chosen |= dict.fromkeys(own_factors, item.target or item.name)
    for factor in needed_whole(dims, chosen):
        why = factor.blocked or "draws, rows or segments that lie across it"
        raise _both(axis, f"{why}, of '{chosen[factor]}'")
    found = sharding_of(dims, set(chosen), sharding.tp)
    for out, now in zip(graph.outputs, part.outputs, strict=True):
        agreed, made = sharding.layouts[out.ref], found.layouts[now.ref]
        if out.kind in AGREED and not _alike(agreed, made, sharding.tp):
            unlike = f"'{out.name}', which is [{made}] where others take it for [{agreed}]"
            raise _both(axis, unlike)
    return found


def _alike(one: Layout, other: Layout, tp: int) -> bool:
    """Whether ranks of tp have the same parts of dims that are as long, and all of the others."""
    for k, (mine, its) in enumerate(zip(one.dims, other.dims, strict=True)):
        if not any(f.split for f in (*mine, *its)):
            continue
        if one.shape[k] != other.shape[k]:
            return False
        ranks = range(tp)
        if not all(torch.equal(one.index(k, tp, r), other.index(k, tp, r)) for r in ranks):
            return False
    return True


def _both(axis: str, what: str) -> PlanError:
    return PlanError(
        f"what is split over tp meets what is split over {axis}, at {what}; use {axis}=1 or tp=1"
    )

"""The memory of a rank's parameters and buffers: of zeros, or of a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from merakc.analysis.buckets import Held, parameters_in_order, plan_buckets
from merakc.frontend.python.compared import Compared
from merakc.lowering.lowered import Lowered
from merakc.runtime.groups import Groups, ShardGroups
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.state import Placement
from merakc.train.batch_reads import BatchReads
from merakc.train.parameters.places import register_places
from merakc.train.parameters.states import tag_optimizers
from merakc.train.steps import Steps

Tensors = dict[str, torch.Tensor]


def allocate(
    placements: Mapping[str, Placement], lowered: Lowered, groups: Groups, device: torch.device
) -> tuple[Tensors, ShardedState | None]:
    """This rank's parameters and buffers, all zeros, and the buckets that parameters stand in.

    There are none where there is one dp rank, no precision but the model's own, and nothing is
    updated on the host; frozen parameters stay whole where parameters are not sharded. All ranks
    must call it.
    """
    pipeline_rank, parts = groups.coordinates[1], groups.mesh.weight_ranks
    state: Tensors = {}
    for name, place in placements.items():
        if pipeline_rank in place.ranks:
            shape = place.layout.local_shape(parts, groups.weight_rank)
            part = torch.empty(shape, dtype=place.dtype, device="meta")
            state[name] = nn.Parameter(part, place.requires_grad) if place.is_parameter else part
    sharded = None
    if lowered.plan.has_buckets:
        sharded = _in_buckets(state, placements, lowered, groups, device)
        state |= sharded.owned
    for name, tensor in state.items():
        if tensor.is_meta:
            zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            state[name] = nn.Parameter(zeros, tensor.requires_grad) if is_parameter else zeros
    register_places(state, placements, groups, sharded)
    tag_optimizers()
    return state, sharded


def _in_buckets(
    state: Tensors,
    placements: Mapping[str, Placement],
    lowered: Lowered,
    groups: Groups,
    device: torch.device,
) -> ShardedState:
    plan, own = lowered.plan, groups.coordinates[1]
    used = dict.fromkeys(i.target for g in lowered.stages.graphs for i in parameters_in_order(g))
    updated, kept = set(plan.on_host.updated), set(plan.on_host.kept)
    held = []
    for name in dict.fromkeys([*used, *state]):
        if isinstance(state.get(name), nn.Parameter):
            place = placements[name]
            shared = sum(plan.rank_of[s] == own for s in place.stages) > 1
            held.append(
                Held(name, place.dtype, state[name].numel(), place.stages, place.requires_grad,
                     shared, name in used, name in updated, name in kept,
                     of_experts=groups.mesh.is_of_experts(place.layout))
            )  # fmt: skip
    every = sorted({plan.shards(s) for s in range(len(plan.rank_of))})
    made = {(shards, False): ShardGroups(groups, shards) for shards in every}
    if plan.expert_parallel:
        for shards in sorted({shards.within(plan.dp) for shards in every}):
            made[shards, True] = ShardGroups(groups, shards, of_experts=True)
    holders = {  # all ranks make all groups, in one order
        ranks: groups.holders(ranks) for ranks in sorted({p.ranks for p in placements.values()})
    }
    tied = {p.stages: holders[p.ranks] for p in placements.values() if own in p.ranks}
    specs = plan_buckets(held, plan.shards, dp=plan.dp)
    return ShardedState(specs, state, made, tied, plan.precision, device)


@torch.no_grad()
def copied(steps: Steps, memo: dict[int, Any]) -> Steps:
    """Steps by the same plan of a deep copy of the model, on values of their own. Nothing of them
    is compiled yet.
    """
    state, sharded = allocate(steps.placements, steps.planned, steps.groups, steps.device)
    with torch._C.DisableTorchFunctionSubclass():
        if sharded is not None and steps.sharded is not None:
            for own, other in zip(sharded.buckets, steps.sharded.buckets, strict=True):
                own.copy_(other)
        for name, tensor in state.items():
            tensor.copy_(steps.state[name])
    source = copy.deepcopy(steps.source, memo)
    compared = Compared(views=steps.compared.views.copied(memo))
    return replace(
        steps, source=source, state=state, sharded=sharded,
        loss_scale=copy.deepcopy(steps.loss_scale), stale=set(steps.stale), compiled={},
        reads=BatchReads(), whole={}, compared=compared, roots=set(), readings={},
    )  # fmt: skip

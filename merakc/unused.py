"""Parameters that a step turns out not to use, which have no gradient then, as in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from merakc.ir.graph import Graph, InputKind
from merakc.kernels.opaque import OPAQUE, Call, find

Uses = Mapping[str, tuple[tuple[Call, int], ...]]
"""By parameter: the calls that alone read it, each with its place among their inputs."""


def doubtful(graph: Graph) -> Uses:
    """The parameters that only modules and parts which run as they are read: what they use may
    differ from batch to batch.
    """
    users = graph.users()
    found: dict[str, tuple[tuple[Call, int], ...]] = {}
    for item in graph.inputs:
        nodes = users[item.name]
        if item.kind is not InputKind.PARAMETER or not item.requires_grad:
            continue
        if nodes and all(node.op == OPAQUE for node in nodes):
            found[item.target] = tuple(
                (find(node.args[-1]), place)
                for node in nodes
                for place, ref in enumerate(node.args[0])
                if ref.node == item.name
            )
    return found


def forget(uses: Uses) -> None:
    """Before a step: nothing was used yet."""
    for call in _calls(uses):
        call.used.clear()


def drop_unused(
    gradients: dict[str, torch.Tensor],
    uses: Uses,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Takes the gradients of parameters that no micro-batch of any rank used out of those of a step
    that trained; collective, where there is a `group` of all ranks and a doubt.
    """
    if not uses:
        return
    used = [any(place in call.used for call, place in places) for places in uses.values()]
    flags = torch.tensor(used, dtype=torch.int32, device=device)
    if group is not None:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    for name, flag in zip(uses, flags.tolist(), strict=True):
        if not flag:
            gradients.pop(name, None)


def _calls(uses: Uses) -> Iterable[Call]:
    return {id(call): call for places in uses.values() for call, _ in places}.values()

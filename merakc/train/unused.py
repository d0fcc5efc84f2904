"""Parameters that a step turns out not to use, which have no gradient then, as in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from merakc.ir.batches import Head
from merakc.ir.graph import Graph, InputKind
from merakc.kernels.opaque import OPAQUE, REACHED, Call, find

Uses = Mapping[str, tuple[tuple[Call, int], ...]]
"""By parameter: the calls that alone read it, each with its place among their inputs; or what notes
which experts have rows, with the number of its own.
"""


def doubtful(graph: Graph, head: Head | None = None) -> Uses:
    """The parameters that only modules and parts which run as they are read, in a part of the batch
    or in the `head`: what they use may differ from batch to batch; and those of experts that a loop
    passes over where they have no rows.
    """
    behind = head.graph if head is not None else Graph((), (), ())
    users, users_behind = graph.users(), behind.users()
    found: dict[str, tuple[tuple[Call, int], ...]] = {}
    for item in graph.inputs:
        if item.kind is not InputKind.PARAMETER or not item.requires_grad:
            continue
        names = [o.name for o in graph.outputs if o.ref.node == item.name]
        readers = [(node, item.name) for node in users[item.name]]
        readers += [(node, name) for name in names for node in users_behind.get(name, ())]
        if readers and all(node.op == OPAQUE for node, _ in readers):
            found[item.target] = tuple(
                (find(node.args[-1]), place)
                for node, name in readers
                for place, ref in enumerate(node.args[0])
                if ref.node == name
            )
    for node in (*graph.nodes, *behind.nodes):
        if node.op == REACHED:
            call = find(node.args[-1])
            found |= {name: ((call, number),) for name, number in call.marks.items()}
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
) -> set[str]:
    """Takes the gradients of parameters that no micro-batch of any rank used out of those of a step
    that trained, and returns the names; collective, where there is a `group` of all ranks and a
    doubt.
    """
    if not uses:
        return set()
    used = [any(place in call.used for call, place in places) for places in uses.values()]
    flags = torch.tensor(used, dtype=torch.int32, device=device)
    if group is not None:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    unused = {name for name, flag in zip(uses, flags.tolist(), strict=True) if not flag}
    for name in unused:
        gradients.pop(name, None)
    return unused


def _calls(uses: Uses) -> Iterable[Call]:
    return {id(call): call for places in uses.values() for call, _ in places}.values()

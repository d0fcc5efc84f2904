"""How the ranks beside each other may share a micro-batch: weights, or sequences."""

from __future__ import annotations

from collections.abc import Iterator

from merakc.batches.split import divisors
from merakc.ir.graph import Graph
from merakc.ir.strategy import Form
from merakc.passes.sharding.experts.ends import GROUPED
from merakc.planner.request import Request


def open_forms(request: Request, node: int, experts: int = 0) -> Iterator[Form]:
    """The degrees of tp, over no more than the devices of a node where it is open, and whether
    sequences are split too; those of cp beside it, and of ranks that share so many experts.
    """
    for lanes in divisors(request.world_size):
        fixed = lanes * (request.pp or 1) * (request.dp or 1)
        if request.world_size % fixed or (
            request.pp and request.dp and fixed != request.world_size
        ):
            continue
        if _is_open(request) and request.expert_parallel is None:
            beside = (tp for tp in divisors(lanes) if tp <= node and 1 < lanes // tp <= experts)
            yield from (Form(tp, False, lanes // tp, True, request.expert_load) for tp in beside)
        if _may_share_sequences(request):
            shared = (tp for tp in divisors(lanes) if tp <= node and tp < lanes)
            yield from (Form(tp, cp=lanes // tp) for tp in shared)
        tp, left = divmod(lanes, request.cp or 1)
        if left or request.tp not in (None, tp) or (request.tp is None and tp > node):
            continue
        if request.cp is not None and request.cp > 1:
            shares = bool(request.expert_parallel)
            load = request.expert_load if shares else ()
            yield Form(tp, cp=request.cp, expert_parallel=shares, expert_load=load)
            continue
        asked = request.sequence_parallel if tp > 1 else False
        yield from (Form(tp, s) for s in (False, True) if asked in (None, s))


def _may_share_sequences(request: Request) -> bool:
    """Whether a search looks at ranks that share sequences where the user leaves that open: where
    ranks are more than samples. Others divide samples with the same work, and less to send.
    """
    samples = request.total_batch_size or request.batch_size * (request.dp or 1)
    return _is_open(request) and samples < request.world_size


def _is_open(request: Request) -> bool:
    """Whether the user leaves open what the ranks that share a micro-batch share."""
    return request.tp is None and request.cp is None and not request.sequence_parallel


def experts_of(graph: Graph) -> int:
    """The most experts of a mixture, by the groups of its products; 0 where there is none."""
    specs = graph.specs()
    return max((specs[n.args[1]].shape[0] for n in graph.nodes if n.op == GROUPED), default=0)

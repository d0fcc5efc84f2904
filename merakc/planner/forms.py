"""How the ranks beside each other may share a micro-batch: weights, or sequences."""

from __future__ import annotations

from collections.abc import Iterator

from merakc.batches.split import divisors
from merakc.ir.strategy import Form
from merakc.planner.request import Request


def open_forms(request: Request, node: int) -> Iterator[Form]:
    """The degrees of tp, over no more than the devices of a node where it is open, and whether
    sequences are split too, or they alone.
    """
    for tp in divisors(request.world_size):
        fixed = tp * (request.pp or 1) * (request.dp or 1)
        if request.world_size % fixed or (
            request.pp and request.dp and fixed != request.world_size
        ):
            continue
        if request.tp not in (None, tp) or (request.tp is None and tp > node):
            continue
        if tp == 1:
            yield Form(tp)
            continue
        if not request.context_parallel:
            asked = request.sequence_parallel
            yield from (Form(tp, s) for s in (False, True) if asked in (None, s))
        if request.context_parallel or _may_share_sequences(request):
            yield Form(tp, context_parallel=True, expert_parallel=bool(request.expert_parallel))


def _may_share_sequences(request: Request) -> bool:
    """Whether a search looks at ranks that share sequences where the user leaves that open: where
    ranks are more than samples. Others divide samples with the same work, and less to send.
    """
    if request.context_parallel is False or request.tp is not None or request.sequence_parallel:
        return False
    samples = request.total_batch_size or request.batch_size * (request.dp or 1)
    return samples < request.world_size

"""ZB-H1 and ZB-H2: one stage a rank, and weight gradients put off to where a rank would wait.

Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.1.
"""

from __future__ import annotations

from merakc.schedules.work import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Work


def zb_h1(ranks: int, micro_batches: int) -> list[list[Work]]:
    """1F1B's warm-up; stage s is s weight gradients behind, so that each stage of p holds p.

    Section 2.1.1: the peak of memory is that of 1F1B's first stage, the bubble a third of 1F1B's.
    """
    return [_stage(s, micro_batches, ranks - s, s) for s in range(ranks)]


def zb_h2(ranks: int, micro_batches: int) -> list[list[Work]]:
    """Twice the warm-up: no rank waits from its first forward to its last weight gradient.

    Section 2.1.2: each stage of p holds up to 2p - 1 micro-batches.
    """
    return [_stage(s, micro_batches, 2 * (ranks - s) - 1, 2 * s) for s in range(ranks)]


def _stage(stage: int, micro_batches: int, warmup: int, behind: int) -> list[Work]:
    """`warmup` forwards, then input gradient, weight gradient and forward in turn."""
    m, first = micro_batches, stage * micro_batches
    warmup = min(m, warmup)
    order = [(FORWARD, first + j) for j in range(warmup)]
    for j in range(m):
        order.append((INPUT_GRAD, first + j))
        if j >= behind:
            order.append((WEIGHT_GRAD, first + j - behind))
        if warmup + j < m:
            order.append((FORWARD, first + warmup + j))
    return order + [(WEIGHT_GRAD, first + j) for j in range(max(0, m - behind), m)]

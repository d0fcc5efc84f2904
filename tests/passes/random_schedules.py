"""Orders of work at random that can run: any placement, split or whole backwards, recomputation."""

from __future__ import annotations

import random
from collections.abc import Sequence

from merakc.ir.program import Action, ActionKind, Transfer
from merakc.ir.schedule import Schedule

F, B, R = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.RECOMPUTE
INPUT, WEIGHT = ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD


def random_schedule(
    rank_of: Sequence[int], micro_batches: int, transfers: Sequence[Transfer], draw: random.Random
) -> Schedule:
    """A walk through the step: one of the computes that could run next, again and again.

    Each is put at the end of its rank's order, so the orders run in the sequence of the walk.
    """
    orders: list[list[Action]] = [[] for _ in range(1 + max(rank_of))]
    needed: dict[Action, set[Action]] = {}
    for stage in range(len(rank_of)):
        for j in range(micro_batches):
            split, again = draw.random() < 0.5, draw.random() < 0.5
            gradient = Action(INPUT if split else B, stage, j)
            needed[Action(F, stage, j)] = {
                Action(F, t.source_stage, j) for t in transfers if t.target_stage == stage
            }
            needed[gradient] = {Action(F, stage, j)}
            if again:
                needed[Action(R, stage, j)] = {Action(F, stage, j)}
                needed[gradient].add(Action(R, stage, j))
            if split:
                needed[Action(WEIGHT, stage, j)] = {gradient}
    gradients = {(a.stage, a.micro_batch): a for a in needed if a.kind in (B, INPUT)}
    for transfer in transfers:
        if transfer.grad:
            for j in range(micro_batches):
                sender = gradients[transfer.target_stage, j]
                needed[gradients[transfer.source_stage, j]].add(sender)
    done: set[Action] = set()
    while len(done) < len(needed):
        ready = [a for a, before in needed.items() if a not in done and before <= done]
        action = draw.choice(ready)
        orders[rank_of[action.stage]].append(action)
        done.add(action)
    return Schedule("random", tuple(rank_of), tuple(map(tuple, orders)))

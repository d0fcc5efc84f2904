"""Values of the whole batch, from those of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from merakc.ir.batches import Rows, Share, ShareKind
from merakc.ir.graph import TensorSpec
from merakc.passes.batches.proof.replay import joined, replay
from tests.passes.batches.forwards import BOUND, Step, check, in_parts

SPEC = TensorSpec((8, 2), torch.float64)


def test_parts_are_joined_by_what_they_are() -> None:
    parts = [torch.full((n, 2), float(n), dtype=torch.float64) for n in (3, 5)]
    rows = joined(Share("x", ShareKind.ROWS, SPEC, Rows()), parts, (3, 5))
    assert rows[:, 0].tolist() == [3.0] * 3 + [5.0] * 5
    alike = [torch.tensor(2.0), torch.tensor(4.0)]
    assert joined(Share("x", ShareKind.SUM, SPEC), alike, (3, 5)) == 6.0
    ints = [torch.tensor(2), torch.tensor(2)]
    assert joined(Share("x", ShareKind.CONSTANT, SPEC), ints, (3, 5)) == 2


def test_of_what_is_the_same_each_part_has_its_share_of_the_gradient() -> None:
    x = [torch.ones((), requires_grad=True) for _ in range(2)]
    joined(Share("x", ShareKind.CONSTANT, SPEC), x, (6, 2)).backward()
    assert [t.grad.item() for t in x if t.grad is not None] == [0.75, 0.25]


def loss_of_replay(step: Step) -> torch.Tensor:
    state = {**dict(step.model.named_parameters()), **dict(step.model.named_buffers())}
    return replay(step.splits, step.sizes, state, step.batch, step.found[0].sampled, seed=3)


def test_draws_are_the_same_in_parts_of_any_sizes() -> None:
    losses = [
        loss_of_replay(
            in_parts(lambda m, z, b: torch.nn.functional.dropout(z).sin().sum(), sizes=sizes)
        )
        for sizes in ((4, 4), (3, 2, 3), (2, 6))
    ]
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("sizes", [(4, 4), (2, 6), (3, 2, 3), (2, 2, 2, 2)])
def test_a_replay_sees_a_part_that_is_wrong(sizes: tuple[int, ...]) -> None:
    step = check(lambda m, z, b: z.square().mean(), sizes=sizes)
    nodes = step.graph.nodes
    wrong = replace(
        step.graph, nodes=(*nodes[:-1], replace(nodes[-1], args=(nodes[-1].args[0], 1.0)))
    )
    broken = replace(step, splits=(replace(step.splits[0], graph=wrong), *step.splits[1:]))
    assert abs(loss_of_replay(broken) - loss_of_replay(step)) > 1e-3

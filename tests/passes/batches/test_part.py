"""The graph of a part: shares of means and constants, the whole batch's numbers, its own places."""

from __future__ import annotations

import pytest
import torch

from merakc.ir.graph import Ref
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.batches.part import keyed, known_name, share_name
from tests.passes.batches.forwards import CLASSES, Loss, check, in_parts


def test_names_tell_outputs_apart() -> None:
    assert known_name(Ref("max")) == "known.max"
    assert known_name(Ref("max", 1)) == "known.max.1"
    assert share_name(Ref("max")) == "share.max"
    assert share_name(Ref("max", 2)) == "share.max.2"


def test_a_mean_over_samples_is_taken_by_the_share_of_a_part() -> None:
    step = check(lambda m, z, b: z.square().mean())
    for part, n in zip(step.splits, step.sizes, strict=True):
        *_, mean, share = part.graph.nodes
        assert mean.op == "aten.mean.default"
        assert (share.op, share.args) == ("aten.mul.Tensor", (Ref(mean.name), n / 8))


def test_a_mean_over_classes_is_not() -> None:
    step = in_parts(lambda m, z, b: z.square().mean(1).sum())
    assert all(n.op != "aten.mul.Tensor" for n in step.graph.nodes)


def test_numbers_of_the_whole_batch_stand_in_arithmetic_and_a_parts_in_shapes() -> None:
    step = in_parts(lambda m, z, b: (z / len(z)).reshape(len(z) * CLASSES).sum())
    by_op = {n.op: n for n in step.graph.nodes}
    assert by_op["aten.div.Tensor"].args[1] == 8
    assert by_op["aten.reshape.default"].args[1] == (step.sizes[0] * CLASSES,)


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, z, b: z.sum() + m.scale + 3,
        lambda m, z, b: m.scale * 2 + m.vector.sum(),
        lambda m, z, b: b["weight"].sum() + z.sum(),
        lambda m, z, b: b["weight"].mean() * m.scale,
        lambda m, z, b: torch.zeros(()) + z.mean(),
    ],
)
def test_a_loss_of_constants_counts_once(loss: Loss) -> None:
    check(loss)


def test_the_words_of_a_head_are_left_out_of_the_parts() -> None:
    step = check(lambda m, z, b: (z @ z.T).square().sum())
    assert [n.op for n in step.graph.nodes] == ["aten.linear.default"]
    assert "pow" not in str(step.graph)


@pytest.mark.parametrize(
    ("draw", "keying"),
    [
        (lambda z: torch.nn.functional.dropout(z), (0, (3, CLASSES))),
        (lambda z: torch.nn.functional.dropout(z.t()).t(), (1, (CLASSES, 3, 1))),
        (lambda z: z * torch.rand(CLASSES), (-1, (CLASSES,))),
        (lambda z: z * torch.rand(len(z), 1), (0, (3, 1))),
    ],
)
def test_draws_are_keyed_by_the_samples(draw: object, keying: tuple[int, tuple[int, ...]]) -> None:
    step = in_parts(lambda m, z, b: draw(z).sum())  # type: ignore[operator]
    (node,) = [n for n in step.graph.nodes if n.op in KEY_POSITION]
    at = KEY_POSITION[node.op] + 1
    sample, sizes = keying
    assert node.args[at : at + 4] == (sample, sizes, (0,) * len(sizes), sizes)
    again = keyed(step.found[0], node, 3, together=True)
    assert again.args[at : at + 2] == (0, (1, node.spec.numel))

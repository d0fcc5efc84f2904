"""The graph of a part: shares of means and constants, the whole batch's numbers, its own places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from merakc.errors import RecordError
from merakc.ir.graph import Ref
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.batches.part import keyed, known_name, share_name
from tests.passes.batches.forwards import CLASSES, Loss, check, in_parts
from tests.passes.batches.modules import compare


def test_names_tell_outputs_apart() -> None:
    assert known_name(Ref("max")) == "known.max"
    assert known_name(Ref("max", 1)) == "known.max.1"
    assert share_name(Ref("max")) == "share.max"
    assert share_name(Ref("max", 2)) == "share.max.2"


def test_a_mean_over_samples_is_a_sum_over_the_elements_of_the_whole_batch() -> None:
    step = check(lambda m, z, b: z.square().mean())
    for part in step.splits:
        *_, total, mean = part.graph.nodes
        assert total.op == "aten.sum.default"
        assert (mean.op, mean.args) == ("aten.div.Tensor", (Ref(total.name), 8 * CLASSES))


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


LENGTH, WIDTH = 4, 3


class Filled(nn.Module):
    """Texts in whose places the features of an image stand, two for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(5, 2 * WIDTH, dtype=torch.float64)
        self.words = nn.Parameter(torch.ones(LENGTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """`x` [n, 5], `mask` [n, LENGTH]."""
        texts = self.words.expand(len(x), LENGTH, WIDTH)
        features = self.image(x).reshape(-1, WIDTH)
        filled = texts.masked_scatter(mask.unsqueeze(-1), features)
        return {"loss": (filled * torch.arange(LENGTH)[:, None]).pow(2).mean()}


def _batch(rows: list[list[int]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(rows), 5, dtype=torch.float64, generator=generator)
    return {"x": x, "mask": torch.tensor(rows, dtype=torch.bool)}


@pytest.mark.parametrize("parts", [2, 4])
def test_values_are_put_into_the_places_of_their_own_samples(parts: int) -> None:
    rows = [[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1]]
    split = compare(Filled(), _batch(rows), parts)
    assert split.head is None


def test_a_part_with_places_for_the_values_of_another_is_refused() -> None:
    rows = [[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 1, 0]]
    with pytest.raises(RecordError, match="has 6 places, and values for 4"):
        compare(Filled(), _batch(rows), 2)


class Heads(nn.Module):
    """A table that is copied for each sample and each of its two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """`x` [n, 2, WIDTH]."""
        copies = self.table.expand(2 * len(x), WIDTH)
        return {"loss": (x.flatten(0, 1) * copies).pow(2).mean()}


def test_copies_may_be_several_for_each_sample() -> None:
    split = compare(Heads(), {"x": torch.randn(4, 2, WIDTH, dtype=torch.float64)}, 2)
    assert split.head is None

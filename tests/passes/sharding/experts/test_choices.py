"""Which masks are known to choose nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.passes.sharding.experts.choices import Choices

TOKENS, EXPERTS, COPIES = 6, 4, 2
Masks = Callable[[Tensor], Sequence[Tensor]]


def _one_hot(scores: Tensor) -> Tensor:
    return F.one_hot(scores.topk(COPIES).indices, EXPERTS)


APART: dict[str, Masks] = {
    "compared": lambda s: [s.argmax(-1) == k for k in range(EXPERTS)],
    "one hot": lambda s: [*_one_hot(s).permute(2, 1, 0)],
    "columns": lambda s: [F.one_hot(s.argmax(-1), EXPERTS)[:, k] for k in range(EXPERTS)],
    "columns in parts": lambda s: [
        F.one_hot(s.view(2, 3, -1).argmax(-1), EXPERTS).view(-1, 1, EXPERTS)[:, :, k]
        for k in range(EXPERTS)
    ],
    "turned": lambda s: [_one_hot(s).transpose(0, 2)[k].bool() for k in range(EXPERTS)],
    "the first ones": lambda s: [
        (m := F.one_hot(s.argmax(-1), EXPERTS) * (s > 0).long())[:, k] * (m[:, k].cumsum(0) < 3)
        for k in range(EXPERTS)
    ],
    "and more": lambda s: [(s.argmax(-1) == k) & (s[:, 0] > 0) for k in range(EXPERTS)],
}
NOT_APART: dict[str, Masks] = {
    "any choice": lambda s: [(s.topk(COPIES).indices == k).any(-1) for k in range(EXPERTS)],
    "above": lambda s: [s.argmax(-1) > k for k in range(EXPERTS)],
    "one twice": lambda s: [s.argmax(-1) == k // 2 for k in range(EXPERTS)],
    "of other choices": lambda s: [s.roll(k, 1).argmax(-1) == k for k in range(EXPERTS)],
    "scores": lambda s: [s[:, k] > 0 for k in range(EXPERTS)],
    "the other dim": lambda s: [F.one_hot(s.argmax(-1), EXPERTS)[k] for k in range(EXPERTS)],
    "times what may be infinite": lambda s: [
        F.one_hot(s.argmax(-1), EXPERTS)[:, k] * s[:, k].exp() for k in range(EXPERTS)
    ],
    "or": lambda s: [(s.argmax(-1) == k) | (s.argmin(-1) == k) for k in range(EXPERTS)],
    "not": lambda s: [s.argmax(-1) != k for k in range(EXPERTS)],
}
COVERING = ("compared", "one hot", "columns", "columns in parts", "turned")


class _Model(nn.Module):
    """Returns masks that it makes of scores."""

    def __init__(self, masks: Masks) -> None:
        super().__init__()
        self.scores, self.masks = nn.Linear(3, EXPERTS), masks

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """All masks."""
        made = self.masks(self.scores(x))
        return {str(k): mask for k, mask in enumerate(made)}


def _choices(masks: Masks) -> tuple[Choices, list[object]]:
    graph = record(_Model(masks), (torch.zeros(TOKENS, 3),), {}).graph
    return Choices(graph), [o.ref for o in graph.outputs]


@pytest.mark.parametrize("name", APART)
def test_masks_that_are_apart(name: str) -> None:
    choices, refs = _choices(APART[name])
    found = choices.of(refs)  # type: ignore[arg-type]
    assert found is not None
    assert choices.covers(found) == (name in COVERING)
    for seed in range(5):
        torch.manual_seed(seed)
        true = sum(m.bool().long() for m in APART[name](torch.randn(TOKENS, EXPERTS)))
        assert isinstance(true, Tensor)
        assert true.max() <= 1
        assert (name not in COVERING) or bool((true == 1).all())


@pytest.mark.parametrize("name", NOT_APART)
def test_masks_that_may_share_an_element(name: str) -> None:
    choices, refs = _choices(NOT_APART[name])
    assert choices.of(refs) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("masks", "known"),
    [
        (lambda s: [s.topk(COPIES).indices == k for k in range(EXPERTS)], (True, False)),
        (lambda s: [s.topk(COPIES, 0).indices == k for k in range(EXPERTS)], (False, True)),
        (lambda s: [s.round().long() == k for k in range(EXPERTS)], (False, False)),
    ],
)
def test_topk_has_no_place_twice(masks: Masks, known: tuple[bool, bool]) -> None:
    choices, refs = _choices(masks)
    found = tuple(choices.distinct(refs, dim) for dim in (0, 1))  # type: ignore[arg-type]
    assert found == known


def test_equal_calls_are_one() -> None:
    graph = record(_Model(lambda s: [s[:, None], s[:, None], s[:, :1]]), (torch.zeros(2, 3),), {})
    choices = Choices(graph.graph)
    one, other, third = (o.ref for o in graph.graph.outputs)
    assert choices.same(one) == choices.same(other) != choices.same(third)

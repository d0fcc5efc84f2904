"""Of which questions the parts of a batch say what the whole of it answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.frontend.values.reads import Reads
from merakc.ir.batches import Rows
from merakc.passes.batches.answers import unsaid

SIZES = (4, 8)


def reads(asked: Any, samples: int, told: Any = ()) -> Reads | None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * 2 if asked(x) else x).sum()  # type: ignore[no-any-return]

    return record(Asking(), (torch.full((samples, 3), 9.0),), {}, None, told).reads


SAID = [
    lambda x: (x * 2 + 1).max() > 3,
    lambda x: x.sum(1).max() > 3,
    lambda x: x.sum() > 3,
    lambda x: (x.sum() > 3).item() == 0,
    lambda x: (x > 3).flatten().any(),
    lambda x: x.max().item() > 3,
    lambda x: (x.amin(0) * torch.arange(3))[1] > 3,
    lambda x: x.max(0)[0][1].exp() > 3,
    lambda x: x[0, 0] > 3,
    lambda x: x[-1, 1] > 3,
    lambda x: x[2].exp()[1] > 3,
    lambda x: x.flatten()[4] > 3,
    lambda x: x[torch.arange(len(x))].any(),
    lambda x: x.masked_fill(x == 9, 1).index_put((x > 8,), torch.tensor(4.0)).max() > 3,
    lambda x: x[torch.arange(len(x))[:, None], torch.arange(3)[None]].any(),
]
UNSAID = [
    lambda x: x[torch.arange(len(x)).flip(0)].any(),
    lambda x: x[None].sum(1).max() > 3,
    lambda x: (x - x.mean()).max() > 3,
    lambda x: (x - x.mean(0)).max() > 3,
    lambda x: x.cumsum(0).max() > 3,
    lambda x: x.sum(0).max() > 3,
    lambda x: x.t().sum(1).max() > 3,
    lambda x: x.sum(0)[2].item() == 36,
    lambda x: x.sum() < 40,
    lambda x: x.sum() > -3,
    lambda x: x.sum() + 10 > 3,
    lambda x: x[len(x) // 2, 0] > 3,
    lambda x: x[len(x) // 2 :].any(),
    lambda x: x[:-1].any(),
    lambda x: x[::2].max() > 3,
    lambda x: x.reshape(2, -1)[1, 0] > 3,
    lambda x: x.reshape(2, -1).any(0)[0],
    lambda x: x.t().flatten()[3] > 3,
    lambda x: x.max() > len(x),
    lambda x: x.max().item() > len(x),
    lambda x: x.max().item() - x.min().item() > 3,
    lambda x: x.argmax() > 3,
    lambda x: len(x.nonzero()) > 3,
    lambda x: x.amax(0).amin() > 3,
    lambda x: x.unbind()[len(x) // 2][0] > 3,
    lambda x: x.std() > 3,
    lambda x: x.unique().tolist()[0] > 3,
    lambda x: x[x > 3].max() > 3,
    lambda x: x[x[:, 0] > 3].any(),
]


@pytest.mark.parametrize(
    ("asked", "said"), [*((q, True) for q in SAID), *((q, False) for q in UNSAID)]
)
def test_parts_say_of_the_whole_what_no_other_part_has_a_share_in(asked: Any, said: bool) -> None:
    part = reads(asked, SIZES[0])
    assert part is not None
    whole = reads(asked, SIZES[1], part.answers)
    left = unsaid(part, whole, {"0": Rows()}, *SIZES)
    assert left == ([] if said else list(part.asked))
    assert unsaid(part, None, {"0": Rows()}, *SIZES) == list(part.asked)

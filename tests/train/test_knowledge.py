"""What is known of a batch before its step: of all its micro-batches, whatever made it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ranks import run_ranks
from merakc.ir.batches import BatchLayout
from merakc.lowering.recording import record_part
from merakc.passes.batches.recorded import in_parts
from merakc.train.knowledge import Knowledge

CPU = torch.device("cpu")
SIZES = (4, 2)


class Model(nn.Module):
    """Weighs its classes by how often they come in the batch, and its samples by their rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = 1.0 / F.one_hot(y, 3).sum(0).clamp(min=1)
        ranks = y.float().argsort(stable=True).float()
        each = F.cross_entropy(self.layer(x), y, weight=weights, reduction="none")
        return (each * ranks).sum() / ranks.sum()


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    total = sum(SIZES)
    return torch.randn(total, 4, generator=draw), torch.randint(0, 3, (total,), generator=draw)


def known(sizes: tuple[int, ...], dp_rank: int) -> list[dict[str, Tensor]]:
    """What the micro-batches of a dp rank see, by name."""
    layout = BatchLayout(sizes, 2, dp_rank)
    first = layout.first(0)
    x, y = (t[first : first + layout.own] for t in batch())
    split = in_parts(record_part(Model(), (x, y), {}, layout, CPU), layout.parts)
    assert split.known is not None
    group = torch.distributed.group.WORLD if len(sizes) > 1 else None
    before = Knowledge(split.known, layout, {}, CPU, group)
    parts = [{"0": a, "1": b} for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    values = before.run(parts)
    return [before.of_part(values, k) for k in range(2)]


def check(found: list[dict[str, Tensor]]) -> None:
    _, y = batch()
    weights = 1.0 / F.one_hot(y, 3).sum(0).clamp(min=1)
    ranks = y.float().argsort(stable=True).float()
    whole = [weights.tolist(), ranks.sum().item()]
    for part in found:
        assert all(value.tolist() in whole for value in part.values() if len(value.shape) == 0)
        assert weights.tolist() in [value.tolist() for value in part.values()]
    rows = [v for v in found[0] if found[0][v].shape == (len(y) // len(found),)]
    joined = [torch.cat([part[name] for part in found]).tolist() for name in rows]
    assert ranks.tolist() in joined


def test_micro_batches_of_one_rank() -> None:
    check(known((sum(SIZES),), 0))


def on_rank() -> list[dict[str, Tensor]]:
    return known(SIZES, torch.distributed.get_rank())


def test_ranks_of_unlike_sizes() -> None:
    _, y = batch()
    weights = (1.0 / F.one_hot(y, 3).sum(0).clamp(min=1)).tolist()
    ranks = y.float().argsort(stable=True).float().tolist()
    first, second = run_ranks(2, on_rank)
    for part in (*first, *second):
        assert weights in [value.tolist() for value in part.values()]
    for name in first[0]:
        if first[0][name].shape == (2,) and second[0][name].shape == (1,):
            assert torch.cat([p[name] for p in (*first, *second)]).tolist() == ranks
            return
    raise AssertionError("no rank of the samples is known")

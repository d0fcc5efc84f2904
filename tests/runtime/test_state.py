from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.ir.layout import parse_layout
from merakc.ir.program import Mesh
from merakc.runtime.state import Pieces, Placement, digest, gather_full

MESH = Mesh(dp=2, tp=2, pp=2)
PLACES = {
    "uneven": Placement(parse_layout("5* x 2"), torch.float64, (1,), (1,), True, True),
    "packed": Placement(parse_layout("3·4*"), torch.float32, (0,), (0,), True, True),
    "tied": Placement(parse_layout("3"), torch.int64, (0, 1), (0, 1), False, False),
    "absent": Placement(parse_layout("7"), torch.float32, (1,), (1,), True, True),
    "number": Placement(parse_layout(""), torch.int64, (1,), (1,), False, False),
}
FULL = {
    "uneven": torch.arange(10).view(5, 2).double(),
    "packed": torch.arange(12).float(),
    "tied": torch.arange(3),
    "number": torch.tensor(4),
}


def gathered() -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    dp, stage, tp = MESH.coordinates(rank)
    local = {
        name: PLACES[name].layout.take(value, MESH.tp, tp) + (100 if dp else 0)
        for name, value in FULL.items()
        if stage in PLACES[name].stages
    }
    if stage == 1:
        local["tied"] += 100  # only the owner's copy counts
    pieces = [Pieces([n], lambda n=n: {n: local[n]}) for n in sorted(local)]
    return gather_full({}, pieces, PLACES, MESH, rank)


def test_gathering_on_rank_0() -> None:
    first, *others = run_ranks(8, gathered)
    assert others == [{}] * 7
    assert first.keys() == FULL.keys()
    for name, value in FULL.items():
        assert torch.equal(first[name], value)
        assert first[name].dtype == value.dtype


def test_one_rank_gathers_copies() -> None:
    place = Placement(parse_layout("3"), torch.float32, (0,), (0,), True, True)
    local = {"w": torch.ones(3)}
    found = gather_full(local, [], {"w": place}, Mesh(), 0)
    found["w"].zero_()
    assert local["w"].sum() == 3


def test_digest_is_of_the_elements() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert digest([x]) == digest([x.T.contiguous().T])
    assert digest([x]) != digest([x + 1])
    assert digest([x.bool()]) != digest([x])
    column = torch.arange(6.0).view(3, 2)[:, 1]  # apart in memory
    assert digest([column]) == digest([column.clone()])


def test_owner_is_the_first_stage() -> None:
    assert PLACES["tied"].owner == 0
    assert PLACES["uneven"].owner == 1

"""What a rank keeps of the weights, and that every part is looked at by two ranks."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ranks import run_ranks
from merakc.ir.layout import parse_layout
from merakc.ir.program import Mesh
from merakc.runtime.groups import Groups
from merakc.runtime.state import Placement
from merakc.train.parameters import parts as module
from merakc.train.parameters.parts import Parts, unlike
from merakc.train.parameters.places import register_places

LAYOUTS = {"rows": "5* x 2", "columns": "3 x 4*", "packed": "2·3* x 2", "whole": "3", "number": ""}
MESH = Mesh(dp=1, tp=2, pp=2)
PLACES = {
    name: Placement(parse_layout(text), torch.float32, (k % 2,), (k % 2,), True, True)
    for k, (name, text) in enumerate(LAYOUTS.items())
}


def value(name: str) -> torch.Tensor:
    shape = PLACES[name].layout.shape
    return torch.arange(PLACES[name].layout.numel).view(shape).double() + len(name)


def taken(mode: str, odd: dict[int, tuple[str, int]]) -> tuple[dict[str, torch.Tensor], str]:
    """This rank's parts, and what differs; the rank `odd` has another element of a tensor."""
    groups = Groups(MESH, dist.get_rank())
    _, stage, tp = groups.coordinates
    state = {
        name: nn.Parameter(torch.zeros(place.layout.local_shape(2, tp)))
        for name, place in PLACES.items()
        if stage in place.stages
    }
    register_places(state, PLACES, groups, None)
    parts = Parts(state, PLACES, groups)
    for name in PLACES:
        given = value(name)
        if (found := odd.get(groups.rank)) is not None and found[0] == name:
            given.view(-1)[found[1]] += 1
        (parts.put_whole if mode == "put" else parts.compare)(name, given)
    everyone: list[module.Digests] = [{}] * 4
    dist.all_gather_object(everyone, parts.digests)
    return {name: p.detach() for name, p in state.items()}, unlike(everyone)


def test_ranks_take_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_BYTES", 40)  # several reads of a tensor
    for rank, (found, differing) in enumerate(run_ranks(4, partial(taken, "put", {}))):
        assert not differing
        _, stage, tp = MESH.coordinates(rank)
        assert found.keys() == {n for n, p in PLACES.items() if stage in p.stages}
        for name, part in found.items():
            wanted = PLACES[name].layout.take(value(name), 2, tp)
            assert torch.equal(part, wanted.float()), name


def test_whatever_a_rank_uses_is_compared() -> None:
    for name, rank in product(("columns", "whole"), range(4)):
        _, stage, tp = MESH.coordinates(rank)
        place = PLACES[name]
        if stage not in place.stages:
            continue
        own = place.layout.take(torch.arange(place.layout.numel).view(place.layout.shape), 2, tp)
        at = int(own.view(-1)[-1])
        results = run_ranks(4, partial(taken, "compare", {rank: (name, at)}))
        assert len({differing for _, differing in results}) == 1
        assert results[0][1].startswith(f"'{name}' of rank "), (name, rank)
        assert not any(part.any() for found, _ in results for part in found.values())


def test_unlike_names_the_first_and_counts() -> None:
    part = (0, 0, 4)
    same = {("a", part): "1", ("b", part): "2"}
    assert unlike([same, same]) == ""
    other = {("a", part): "3", ("b", part): "4", ("c", part): "5"}
    assert unlike([same, other]) == "'a' of rank 1 is not as rank 0's, and 1 tensors more"


def test_each_rank_has_its_share_of_the_others_parts() -> None:
    everyone = [{f"{k}.{n}": (0, 0, 10) for n in range(8)} for k in range(4)]
    found = [module._assigned(everyone, rank) for rank in range(4)]
    assert all(6 <= len(own) <= 10 for own in found)
    assert all(not name.startswith(f"{k}.") for k, own in enumerate(found) for name, _ in own)
    assert len({name for own in found for name, _ in own}) == 32
    assert module._assigned([{"a": (0, 0, 1)}] * 2, 0) == []  # they compare with each other

"""Stage costs from pieces."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merakc.costs.device import Place, rank_place, work_seconds
from merakc.costs.fabric import Fabric
from merakc.costs.measured import Corrections
from merakc.costs.stages import (
    PieceCost,
    balanced_stages,
    even_stages,
    layers_of,
    parameter_layers,
    piece_cost,
    shared_parameters,
    stage_costs,
    stage_parameters,
)
from merakc.costs.state import MIXED
from merakc.costs.work.kernels import Kernel, KernelKind, Work
from merakc.costs.work.pieces import Piece
from merakc.machines.cluster import Device
from merakc.machines.cluster_files import preset

PLACE = Place(
    Device("d", {"float32": 1e12}, 1e9, 1 << 30, traffic_share=1.0, launch_s=0.0),
    Fabric(8, 1e9, 1e9, 0.0, 0.0),
    1,
)


def piece(path: str, parameters: dict[str, int], size: int = 1000) -> Piece:
    work = Work(
        Counter({Kernel(KernelKind.TRAFFIC, 0, size): 1}),
        Counter({Kernel(KernelKind.TRAFFIC, 0, size): 2}),
    )
    return Piece(path, work, parameters, saved_bytes=10 * size, handed_bytes=size)


FIRST, BLOCK = piece("", {"words": 50}), piece("b", {"w": 7})
LAST = piece("", {"words": 50, "n": 3})
PIECES = (FIRST, *[BLOCK] * 6, LAST)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (4, [[0, 1, 2], [3], [4, 5], [6, 7]]),
    ],
)
def test_blocks_are_spread_evenly(stages: int, expected: list[list[int]]) -> None:
    found = even_stages(PIECES, [], stages)
    assert sorted(k for stage in found for k in stage) == list(range(8))
    assert found == expected


def test_a_model_without_blocks_is_in_the_first_stage() -> None:
    assert even_stages([FIRST], [], 2) == [[0], []]


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(4, 7))
def test_the_longest_stage_is_as_short_as_it_can_be(
    data: st.DataObject, stages: int, pieces: int
) -> None:
    seconds = st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=pieces, max_size=pieces)
    kinds = [[PieceCost(s, 2 * s) for s in data.draw(seconds)] for _ in range(2)]
    costs = [kinds[data.draw(st.integers(0, 1))] for _ in range(stages)]

    def longest(parts: list[list[int]]) -> float:
        return max(3 * sum(own[k].forward_s for k in part)
                   for own, part in zip(costs, parts, strict=True))  # fmt: skip

    found = balanced_stages(costs)
    inner = combinations(range(1, pieces), stages - 1)
    every = [[[*range(a, b)] for a, b in pairwise((0, *ends, pieces))] for ends in inner]
    assert found in every
    assert longest(found) == min(map(longest, every))


def test_a_stage_takes_what_its_pieces_take() -> None:
    costs = [piece_cost(p, PLACE) for p in PIECES]
    first, second = stage_costs(PIECES, costs, [[0, 1, 2, 3], [4, 5, 6, 7]], PLACE)
    once_s = work_seconds(BLOCK.work.forward, PLACE)
    assert first.forward_s == pytest.approx(4 * once_s)
    assert first.recompute_s == pytest.approx(3 * once_s)
    added_s = 6 * (50 + 3 * 7) / 1e9  # a gradient read, and its sum read and written
    assert first.backward_s == pytest.approx(4 * 2 * once_s + added_s)
    assert first.saved_bytes == 4 * 10_000
    assert first.checkpoint_bytes == 3 * 1000 + 10_000
    assert second.static_bytes == 16 * (50 + 3 + 3 * 7)
    assert MIXED.optimizer_bytes == 12


def test_parameters_are_counted_once_and_equal_blocks_each() -> None:
    assert stage_parameters(PIECES) == 50 + 3 + 6 * 7
    assert shared_parameters(PIECES, [[0, 1], [2, 7]]) == {"words": 50}
    assert shared_parameters(PIECES, [list(range(8))]) == {}


def test_blocks_that_share_parameters_hold_them_once() -> None:
    block = replace(piece("b", {"w": 7, "bias": 2}), shared=frozenset({"w"}))
    pieces = (FIRST, *[block] * 6, LAST)
    assert stage_parameters(pieces) == 50 + 3 + 7 + 6 * 2
    assert shared_parameters(pieces, [[0, 1], [2, 3], [7]]) == {"words": 50, "w": 7}


def test_what_was_measured_corrects_what_was_modelled() -> None:
    corrections = Corrections({"block": 0.5})
    plain, corrected = piece_cost(BLOCK, PLACE), piece_cost(BLOCK, PLACE, corrections, ("block",))
    assert corrected.forward_s == pytest.approx(plain.forward_s * 1.6487, rel=1e-4)
    assert (plain.measured, corrected.measured) == (False, True)


def test_the_place_of_a_rank() -> None:
    place = rank_place(preset("h100", 4), 32, 2, overlap=True)
    assert (place.device.name, place.tp, place.overlap) == ("h100", 2, True)
    assert place.fabric.ranks_per_node == 8
    assert rank_place(preset("h100"), 8, device=PLACE.device).device is PLACE.device


def test_parameters_of_experts_are_counted_apart() -> None:
    block = replace(piece("b", {"w": 7, "e": 20}), experts=frozenset({"e"}))
    every = [FIRST, block, block]
    counts = [stage_parameters(every, of_experts=which) for which in (None, False, True)]
    assert counts == [50 + 54, 50 + 14, 40]
    cost = PieceCost(1.0, 2.0)
    found = layers_of(every, [cost] * 3)
    assert [(la.parameters, la.of_experts) for la in found] == [
        (50, False),
        *[(20, True), (7, False)] * 2,
    ]
    assert sum(layer.forward_s for layer in found) == 3.0
    each = parameter_layers([block], [cost])
    assert [(la.parameters, la.of_experts) for la in each] == [(7, False), (20, True)]
    assert sum(layer.backward_s for layer in each) == pytest.approx(2.0)

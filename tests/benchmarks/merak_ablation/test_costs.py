"""Blocks in parts: what they take beside collectives, and what stages of them cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.gpt import Shape, gpt_pieces
from benchmarks.merak_ablation.__main__ import merak_hardware
from benchmarks.merak_ablation.costs import (
    Span,
    block_seconds,
    even_time,
    in_backward,
    parted_costs,
    pieces_of,
    with_kept_blocks,
)
from merakc.costs.device import Place, rank_place
from merakc.costs.fabric import all_reduce_seconds
from merakc.costs.stages import even_stages, piece_cost, stage_costs
from merakc.passes.overlap.async_collectives import SLOWDOWN

SHAPE = Shape(1024, 16, 6, 512, 2048)
HARDWARE = merak_hardware()
MICRO_BATCH = 4


def at(tp: int, launch_s: float = 0.0) -> Place:
    place = rank_place(HARDWARE, 64, tp)
    return replace(place, device=replace(place.device, launch_s=launch_s))


def total_s(tp: int, parts: int, place: Place | None = None) -> float:
    found = block_seconds(SHAPE, MICRO_BATCH, place or at(tp), parts)
    return found.forward.each_s + found.backward.each_s


def test_blocks_in_a_row() -> None:
    assert [Span(2.0, 1.0).of(n) for n in (0, 1, 3)] == [0.0, 3.0, 7.0]


@pytest.mark.parametrize("launch_s", [0.0, 3e-5])
@pytest.mark.parametrize("tp", [1, 4])
def test_blocking_is_what_the_cost_model_says_of_a_piece(tp: int, launch_s: float) -> None:
    place = at(tp, launch_s)
    found = block_seconds(SHAPE, MICRO_BATCH, place, 0)
    piece = piece_cost(gpt_pieces(SHAPE, MICRO_BATCH, tp)[2], place)
    assert found.forward.each_s == pytest.approx(piece.forward_s, rel=1e-9)
    assert found.backward.each_s == pytest.approx(piece.backward_s, rel=1e-9)
    halves_s = found.input_grad.each_s + found.weight_grad.each_s
    assert halves_s == pytest.approx(piece.backward_s, rel=0.05)  # launches overlap otherwise


def test_parts_launch_all_kernels_anew() -> None:
    slow = block_seconds(SHAPE, MICRO_BATCH, at(2, 1e-2), 0).forward.each_s
    assert block_seconds(SHAPE, MICRO_BATCH, at(2, 1e-2), 2).forward.each_s == pytest.approx(
        2 * slow, rel=1e-3
    )


def test_the_pieces_are_those_of_the_fidelity_benchmark() -> None:
    ours, theirs = pieces_of(SHAPE, MICRO_BATCH, 2), gpt_pieces(SHAPE, MICRO_BATCH, 2)
    assert [p.work for p in ours] == [p.work for p in theirs]
    assert [p.saved_bytes for p in ours] == [p.saved_bytes for p in theirs]


def test_parts_hide_collectives_and_cost_smaller_kernels() -> None:
    assert total_s(4, 2) < 0.9 * total_s(4, 0)
    # What is left is no less than the work of the parts, with nothing to wait for.
    fast = replace(at(4).fabric, local_bytes_per_s=1e15, local_latency_s=0.0)
    alone_s = total_s(4, 2, replace(at(4), fabric=fast))
    assert total_s(4, 2) > alone_s > 1.0001 * total_s(4, 0, replace(at(4), fabric=fast))


def test_alone_a_block_has_nothing_to_hide() -> None:
    assert total_s(1, 1) == pytest.approx(total_s(1, 0))
    assert total_s(1, 2) > total_s(1, 0)


def test_computing_beside_collectives_is_slower_by_what_was_measured() -> None:
    # Links so slow that nothing else counts: the work beside them shows as contention alone.
    slow = replace(at(4).fabric, local_bytes_per_s=1e8)
    place = replace(at(4), fabric=slow)
    found = block_seconds(SHAPE, MICRO_BATCH, place, 2).forward.each_s
    half_bytes = MICRO_BATCH // 2 * SHAPE.seq_len * SHAPE.hidden_size * 2
    wire_s = 4 * all_reduce_seconds(half_bytes, place.group("tp"), slow)
    work_s = block_seconds(SHAPE, MICRO_BATCH, at(1), 2).forward.each_s / 4
    assert wire_s < found < wire_s + 3 * (SLOWDOWN - 1) * work_s


def test_stages_cost_what_they_did_where_nothing_overlaps() -> None:
    pieces, place = pieces_of(SHAPE, MICRO_BATCH, 2), at(2)
    stages = even_stages(pieces, [], 2)
    found = parted_costs(pieces, stages, block_seconds(SHAPE, MICRO_BATCH, place, 0), place)
    plain = stage_costs(pieces, [piece_cost(p, place) for p in pieces], stages, place)
    for own, cost in zip(found, plain, strict=True):
        # The first and the last block take a little less than those between.
        assert own.forward_s == pytest.approx(cost.forward_s, rel=0.01)
        assert own.backward_s == pytest.approx(cost.backward_s, rel=0.01)
        assert own.recompute_s == pytest.approx(cost.recompute_s, rel=0.01)
        assert own.input_grad_s + own.weight_grad_s == pytest.approx(cost.backward_s, rel=0.05)
        assert (own.saved_bytes, own.static_bytes) == (cost.saved_bytes, cost.static_bytes)
    assert found[0].backward_peak_bytes < found[-1].backward_peak_bytes  # the logits' gradient


def test_recomputing_in_the_backward_holds_one_block() -> None:
    pieces, place = pieces_of(SHAPE, MICRO_BATCH, 1), at(1)
    blocks = block_seconds(SHAPE, MICRO_BATCH, place, 0)
    cost = parted_costs(pieces, even_stages(pieces, [], 1), blocks, place)[0]
    found = in_backward(cost)
    assert found.backward_s == pytest.approx(cost.backward_s + 6 * blocks.forward.each_s)
    assert (found.recompute_s, found.saved_bytes) == (0.0, cost.checkpoint_bytes)
    assert found.backward_peak_bytes >= pieces[2].saved_bytes


def test_kept_blocks_cost_memory_and_save_time() -> None:
    pieces, place = pieces_of(SHAPE, MICRO_BATCH, 1), at(1)
    blocks = block_seconds(SHAPE, MICRO_BATCH, place, 0)
    cost = parted_costs(pieces, even_stages(pieces, [], 1), blocks, place)[0]
    assert with_kept_blocks(cost, 6, 0) == cost
    everything = with_kept_blocks(cost, 6, 6)
    assert (everything.recompute_s, everything.checkpoint_bytes) == (0.0, cost.saved_bytes)
    half = with_kept_blocks(cost, 6, 3)
    assert half.recompute_s == pytest.approx(cost.recompute_s / 2)
    assert half.checkpoint_bytes == pytest.approx((cost.checkpoint_bytes + cost.saved_bytes) / 2)


def test_stages_of_even_time() -> None:
    pieces = pieces_of(SHAPE, MICRO_BATCH, 1)
    seconds = [0.1, 1, 1, 1, 1, 1, 1, 2.5]
    stages = even_time(pieces, seconds, 3)
    assert [sum(seconds[k] for k in stage) for stage in stages] == pytest.approx([3.1, 3, 2.5])
    for count in range(1, 9):
        found = even_time(pieces, seconds, count)
        assert [k for stage in found for k in stage] == list(range(8))
        assert all(found)
        assert all(a[-1] < b[0] for a, b in pairwise(found))

"""Layouts, the orders that they run, and which is the best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpt import Shape
from benchmarks.merak_ablation.__main__ import merak_hardware
from benchmarks.merak_ablation.costs import pieces_of
from benchmarks.merak_ablation.plans import (
    Laid,
    Layout,
    Setting,
    fastest,
    generated,
    keep_most,
    known,
    late,
    lay_out,
    layouts,
    our_best,
    our_layouts,
    shifted,
    stage_aware,
    unrecomputed,
)
from merakc.planner.estimate import estimate_step
from merakc.planner.job import Framework

SHAPE = Shape(192, 6, 8, 128, 512)
SETTING = Setting("small", merak_hardware(), 256, (1, 2, 4))
PIPED = Layout(2, 4, 2)


def laid(layout: Layout = PIPED, capacity_bytes: int | None = None) -> Laid:
    found = lay_out(SHAPE, SETTING, layout)
    assert found is not None
    return found if capacity_bytes is None else replace(found, capacity_bytes=capacity_bytes)


def test_without_parts_a_step_is_that_of_the_estimate() -> None:
    one = laid()
    assert (one.strategy.dp, one.strategy.micro_batches) == (8, 16)
    (found,) = unrecomputed(one)
    assert found is not None
    expected = estimate_step(
        pieces_of(SHAPE, 2, 2), one.strategy, SETTING.hardware, Framework(split_messages=True)
    )
    # The first and the last block take a little less than those between.
    assert found.step_s == pytest.approx(expected.step_s, rel=0.02)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(3, 1, 1),  # 64 ranks do not divide
        Layout(4, 2, 1),  # nor do 6 heads
        Layout(1, 16, 1),  # nor 8 layers
        Layout(1, 1, 8),  # nor the batch
        Layout(2, 2, 1, parts=2),  # nor a micro-batch
        Layout(4, 16, 1, zero=True),  # there is one dp rank
    ],
    ids=str,
)
def test_what_does_not_divide_is_no_layout(layout: Layout) -> None:
    assert lay_out(SHAPE, SETTING, layout) is None


def test_uneven_heads_where_they_may_be() -> None:
    assert lay_out(SHAPE, replace(SETTING, whole_heads=False), Layout(4, 2, 1)) is not None


def test_each_way_to_recompute_is_shorter_than_the_one_before() -> None:
    one = laid()
    steps = [fastest(step(one)) for step in (late, shifted, unrecomputed)]
    seconds = [found.step_s for found in steps if found]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3
    assert steps[1] is not None
    assert "none on the last stage" in steps[1].how


def test_what_needs_more_than_there_is_does_not_fit() -> None:
    (found,) = unrecomputed(laid())
    assert found is not None
    assert list(unrecomputed(laid(capacity_bytes=found.peak_bytes - 1))) == [None]
    assert list(unrecomputed(laid(capacity_bytes=found.peak_bytes))) != [None]


def test_as_many_blocks_are_kept_as_fit() -> None:
    (everything,), (nothing,) = unrecomputed(laid()), late(laid())
    assert everything is not None
    assert nothing is not None
    whole = keep_most(laid(), "1f1b", is_late=False)
    assert whole is not None
    assert whole[1:] == ([], 1.0)
    assert all(cost.recompute_s == 0.0 for cost in whole[0])
    assert keep_most(laid(capacity_bytes=1), "1f1b", is_late=False) is None
    between = (everything.peak_bytes + nothing.peak_bytes) // 2
    one = laid(capacity_bytes=between)
    found = keep_most(one, "1f1b", is_late=True)
    assert found is not None
    _, recomputed, kept = found
    assert 0 < kept < 1
    assert 0 in recomputed  # the first stage holds most micro-batches
    assert 3 not in recomputed
    best = fastest(stage_aware(one))
    assert best is not None
    assert everything.step_s < best.step_s < nothing.step_s
    assert best.peak_bytes <= between


def test_every_known_schedule_is_tried_and_has_its_own_peak() -> None:
    for layout, names in (
        (PIPED, {"1f1b", "merak", "zb-h1"}),
        (replace(PIPED, placement="v", chunks=2), {"zb-v", "v-half", "v-min"}),
        (replace(PIPED, placement="interleaved", chunks=2), {"interleaved-1f1b"}),
    ):
        found = [f for f in known(laid(layout)) if f]
        assert {f.how.split(",")[0] for f in found} == names
        assert all(f.step_s > f.laid.after_s for f in found)


def test_a_generated_order_fits_and_is_not_slower_than_known_ones() -> None:
    both = [laid(PIPED), laid(replace(PIPED, placement="v", chunks=2))]
    (full,) = unrecomputed(both[0])
    assert full is not None
    tight = [replace(one, capacity_bytes=int(0.9 * full.peak_bytes)) for one in both]
    made = generated(tight)
    assert made is not None
    assert made.peak_bytes <= tight[0].capacity_bytes
    plain = [fastest(known(one)) for one in tight]
    # Known ones may recompute single blocks, generated ones whole micro-batches of a stage.
    assert made.step_s <= 1.05 * min(f.step_s for f in plain if f)
    assert generated([replace(one, capacity_bytes=1) for one in both]) is None


def test_the_layouts_that_are_tried() -> None:
    theirs = list(layouts(SETTING, (1, 2), parts=2))
    assert {(o.tp, o.pp) for o in theirs} == {
        (tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4, 8, 16, 32, 64) if tp * pp <= 64
    }
    assert all(o.parts == (2 if o.tp > 1 else 0) for o in theirs)
    ours = list(our_layouts(SHAPE, replace(SETTING, whole_heads=False), (2,)))
    assert {o.placement for o in ours} == {"plain", "v", "interleaved"}
    assert {o.sequence_parallel for o in ours if o.tp == 1} == {False}
    assert all(o.ours for o in ours)


def test_our_best_plan_is_no_slower_than_any_that_was_tried() -> None:
    best = our_best(SHAPE, SETTING, (1, 2))
    assert best is not None
    free = replace(SETTING, whole_heads=False)
    for layout in our_layouts(SHAPE, free, (1, 2)):
        if layout.placement == "plain" and (one := lay_out(SHAPE, free, layout)):
            found = fastest(unrecomputed(one))
            assert found is None or best.step_s <= found.step_s
    assert best.peak_bytes <= SETTING.capacity_bytes

"""List scheduling: complete orders, never over the cap, and no lock-up for want of memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merakc.ir.costs import StageCost
from merakc.schedules.check import check_schedule
from merakc.schedules.list_scheduler import Rules, list_schedule
from merakc.schedules.placement import place
from merakc.schedules.timing import make_pipeline, peak_bytes, run_orders
from merakc.schedules.work import decode
from tests.schedules.unit_costs import KEPT, unit_costs


@st.composite
def stage_costs(draw: st.DrawFn) -> StageCost:
    seconds = st.integers(1, 4)
    saved = draw(st.integers(1, 40))
    return StageCost(
        forward_s=draw(seconds),
        backward_s=draw(seconds),
        input_grad_s=draw(seconds),
        weight_grad_s=draw(seconds),
        recompute_s=draw(seconds),
        saved_bytes=saved,
        checkpoint_bytes=draw(st.integers(0, saved)),
        deferred_bytes=draw(st.integers(0, saved)),
        forward_peak_bytes=draw(st.integers(0, 60)),
        backward_peak_bytes=draw(st.integers(0, 60)),
        checkpoint_peak_bytes=draw(st.integers(0, 60)),
        recompute_peak_bytes=draw(st.integers(0, 60)),
        weight_peak_bytes=draw(st.integers(0, 60)),
        static_bytes=draw(st.integers(0, 9)),
    )


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_costs_under_any_cap(data: st.DataObject) -> None:
    ranks, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    placement = data.draw(st.sampled_from(["plain", "interleaved", "v"]))
    chunks = 1 if placement == "plain" else data.draw(st.integers(1, 3))
    rank_of = place(placement, ranks, chunks)
    costs = [data.draw(stage_costs()) for _ in rank_of]
    pipeline = make_pipeline(rank_of, costs, m, data.draw(st.integers(0, 3)))
    units = st.integers(0, len(rank_of) * m - 1)
    recomputed = data.draw(st.frozensets(units))
    rules = Rules(
        split=data.draw(st.booleans()),
        deepest_first=data.draw(st.booleans()),
        oldest_first=data.draw(st.booleans()),
        max_pending=data.draw(st.integers(0, 3)),
        patience=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    # Enough for one micro-batch in all stages of a rank, and up to three more.
    more = data.draw(st.integers(0, 3))
    need = [
        (1 + more) * sum(c.saved_bytes for c in own)
        + sum(c.static_bytes for c in own)
        + max(getattr(c, f) for c in own for f in StageCost.__slots__ if f.endswith("peak_bytes"))
        for own in _by_rank(costs, rank_of)
    ]
    orders = list_schedule(pipeline, need, rules, recomputed)
    assert orders is not None
    check_schedule(decode("listed", rank_of, orders, m))
    for rank, order in enumerate(orders):
        assert peak_bytes(pipeline, rank, order) <= need[rank]
    again = {u for order in orders for kind, u in order if kind == 4}
    assert again == recomputed


def _by_rank(costs: list[StageCost], rank_of: tuple[int, ...]) -> list[list[StageCost]]:
    owned: list[list[StageCost]] = [[] for _ in range(max(rank_of) + 1)]
    for cost, rank in zip(costs, rank_of, strict=True):
        owned[rank].append(cost)
    return owned


def test_too_little_memory_for_one_micro_batch() -> None:
    pipeline = make_pipeline(place("plain", 2), unit_costs(2), 3)
    assert list_schedule(pipeline, [KEPT, KEPT - 1], Rules()) is None
    assert list_schedule(pipeline, [KEPT, KEPT], Rules()) is not None


def test_limits_of_begun_micro_batches() -> None:
    pipeline = make_pipeline(place("plain", 3), unit_costs(3), 6)
    orders = list_schedule(pipeline, [9 * KEPT] * 3, Rules(max_in_flight=(2, 1, 1)))
    assert orders is not None
    held = [peak_bytes(pipeline, rank, order) / KEPT for rank, order in enumerate(orders)]
    assert held[0] >= 2
    for (first, second), order in zip(((0, 2), (6, 1), (12, 1)), orders, strict=True):
        begun = 0
        for kind, unit in order:
            assert unit >= first
            begun += {0: 1, 2: -1}.get(kind, 0)
            assert begun <= second


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_splitting_the_backward_fills_gaps(ranks: int) -> None:
    pipeline = make_pipeline(place("plain", ranks), unit_costs(ranks), 2 * ranks)
    found = []
    for split in (False, True):
        orders = list_schedule(pipeline, [ranks * KEPT] * ranks, Rules(split=split))
        assert orders is not None
        ends = run_orders(pipeline, orders)
        assert ends is not None
        found.append(max(end[-1] for end in ends))
    assert found[1] < found[0]

"""The check of Programs, and the simulated times and bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merakc.costs.fabric import Fabric
from merakc.costs.state import DpGroup, Layer, collective_seconds, state_cost
from merakc.errors import ProgramError
from merakc.ir.costs import CostTable, GraphCollective, StageCost
from merakc.ir.program import (
    Action,
    ActionKind,
    Collective,
    CollectiveEvent,
    CollectiveKind,
    Event,
    Mesh,
    Program,
    Transfer,
)
from merakc.ir.state import StateShards
from merakc.passes.programs.schedule import build_programs
from merakc.schedules.registry import make_schedule
from merakc.schedules.text import parse_schedule
from merakc.simulation.simulate import Simulation, simulate

F, B, I, W = (  # noqa: E741 - the field's own letters
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRAD,
    ActionKind.WEIGHT_GRAD,
)
SEND, RECV, REDUCE = ActionKind.SEND, ActionKind.RECV, ActionKind.REDUCE
INSTANT_BYTES_PER_S = float("inf")


def _chain(stages: int, size_bytes: int = 0) -> list[Transfer]:
    return [Transfer(f"h{s}", s, s + 1, size_bytes, grad=True) for s in range(stages - 1)]


def _unit_costs(stages: int, **costs: int) -> CostTable:
    return CostTable((StageCost(1.0, 2.0, **costs),) * stages, 0.0, INSTANT_BYTES_PER_S)


def _simulate_chain(schedule: str, stages: int, micro_batches: int, **costs: int) -> Simulation:
    programs = build_programs(
        Mesh(pp=stages), make_schedule(schedule, stages, micro_batches), _chain(stages)
    )
    return simulate(programs, _unit_costs(stages, **costs))


# --- times ---------------------------------------------------------------------------------


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 9), st.integers(1, 20))
def test_unit_times(schedule: str, p: int, m: int) -> None:
    found = _simulate_chain(schedule, p, m)
    assert found.step_s == (m + p - 1) * 3
    assert found.busy_s == (3 * m,) * p
    assert found.bubble_share == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m", "ratio"), [(4, 8, 1.375), (8, 32, 1.219), (16, 64, 1.234)])
def test_published_1f1b_ratios(p: int, m: int, ratio: float) -> None:
    assert _simulate_chain("1f1b", p, m).step_s / (3 * m) == pytest.approx(ratio, abs=5e-4)


def _two_ranks(first: Iterable[Action], second: Iterable[Action]) -> tuple[Program, Program]:
    return Program(0, tuple(first)), Program(1, tuple(second))


def _message(kind: ActionKind, value: str, size_bytes: int) -> Action:
    """One end of a message from stage 0 to stage 1, each on the rank of its number."""
    here, there = (0, 1) if kind is SEND else (1, 0)
    return Action(kind, here, 0, value, there, size_bytes, peer_stage=there)


def test_link_is_shared_in_order_and_latency_is_added() -> None:
    programs = _two_ranks(
        [Action(F, 0), _message(SEND, "a", 30), _message(SEND, "b", 10)],
        [_message(RECV, "a", 30), _message(RECV, "b", 10), Action(F, 1)],
    )
    costs = CostTable((StageCost(1.0, 0.0),) * 2, p2p_latency_s=0.5, p2p_bytes_per_s=10.0)
    found = simulate(programs, costs)
    assert found.events == (
        Event(0, "0F0", F, 0.0, 1.0),
        Event(0, "send 0F0 a -> 1", SEND, 1.0, 1.0),
        Event(0, "send 0F0 b -> 1", SEND, 1.0, 1.0),
        Event(1, "recv 1F0 a <- 0", RECV, 0.0, 4.5),
        Event(1, "recv 1F0 b <- 0", RECV, 4.5, 5.5),
        Event(1, "1F0", F, 5.5, 6.5),
    )
    assert found.step_s == 6.5
    assert found.busy_s == (1.0, 1.0)
    assert found.bubble_share == pytest.approx(1 - 2 / 13)


def test_stage_costs_and_reduction_are_those_of_the_stage() -> None:
    programs = build_programs(Mesh(dp=2, pp=2), make_schedule("gpipe", 2, 1), _chain(2))
    costs = CostTable(
        (StageCost(1.0, 2.0, reduce_s=0.25), StageCost(10.0, 20.0, reduce_s=7.0)), 0.0, 1.0
    )
    found = simulate(programs, costs)
    assert found.busy_s == (3.25, 37.0, 3.25, 37.0)
    assert found.step_s == 38.0


def test_64_stages_256_micro_batches_are_quick() -> None:
    programs = build_programs(Mesh(pp=64), make_schedule("1f1b", 64, 256), _chain(64))
    start_s = time.process_time()
    assert simulate(programs, _unit_costs(64)).step_s == (256 + 63) * 3
    assert time.process_time() - start_s < 5.0, "should take about one second"


# --- memory --------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 20))
def test_peak_of_saved_activations(p: int, m: int) -> None:
    costs = {"saved_bytes": 10, "forward_peak_bytes": 10, "static_bytes": 1000}
    gpipe = _simulate_chain("gpipe", p, m, **costs).peak_bytes
    one_f_one_b = _simulate_chain("1f1b", p, m, **costs).peak_bytes
    assert gpipe == (1000 + 10 * m,) * p
    assert one_f_one_b == tuple(1000 + 10 * min(m, p - s) for s in range(p))


@pytest.mark.parametrize(
    ("forward_peak_bytes", "backward_peak_bytes", "peak_bytes"),
    [
        (10, 0, 2 * 10),
        (17, 0, 10 + 17),  # the second forward runs beside the first one's saved bytes
        (10, 13, 2 * 10 + 13),  # the first backward beside the saved bytes of both
    ],
)
def test_peaks_of_actions(
    forward_peak_bytes: int, backward_peak_bytes: int, peak_bytes: int
) -> None:
    found = _simulate_chain(
        "gpipe",
        1,
        2,
        saved_bytes=10,
        forward_peak_bytes=forward_peak_bytes,
        backward_peak_bytes=backward_peak_bytes,
    )
    assert found.peak_bytes == (peak_bytes,)


def test_messages_are_alive_from_receipt_to_use_and_from_posting_to_arrival() -> None:
    programs = build_programs(Mesh(pp=2), make_schedule("gpipe", 2, 1), _chain(2, size_bytes=8))
    slow = CostTable((StageCost(1.0, 2.0, saved_bytes=10),) * 2, 0.0, 1.0)
    # rank 0 posts its receive of 8 while the 8 that it sent are under way, beside the saved 10
    assert simulate(programs, slow).peak_bytes == (10 + 8 + 8, 10)
    stage = StageCost(1.0, 2.0, saved_bytes=10, forward_peak_bytes=10)
    # rank 1 runs the forward beside the received 8, which its saved 10 then include
    assert simulate(programs, replace(slow, stages=(stage,) * 2)).peak_bytes == (26, 10 + 8)
    stage = replace(stage, backward_peak_bytes=50)
    # rank 0 runs the backward beside the received gradient
    assert simulate(programs, replace(slow, stages=(stage,) * 2)).peak_bytes == (68, 60)


def test_received_gradients_go_with_their_backward() -> None:
    transfers = [Transfer("h", 0, 1, 100, grad=True)]
    programs = build_programs(Mesh(pp=2), make_schedule("1f1b", 2, 5), transfers)
    stage = StageCost(1.0, 2.0, saved_bytes=10, forward_peak_bytes=10)
    # two micro-batches in flight, one gradient received, the last message sent under way
    found = simulate(programs, CostTable((stage,) * 2, 0.0, 100.0))
    assert found.peak_bytes[0] == 2 * 10 + 100 + 100


def test_sent_payloads_pile_up_on_a_slow_link_alone() -> None:
    programs = build_programs(
        Mesh(pp=2), make_schedule("gpipe", 2, 4), _chain(2, size_bytes=100), forward_only=True
    )
    for bytes_per_s, peak_bytes in ((100.0, 100), (1.0, 400)):
        costs = CostTable((StageCost(1.0, 0.0, saved_bytes=7),) * 2, 0.0, bytes_per_s)
        assert simulate(programs, costs).peak_bytes == (peak_bytes, 100)


def test_a_message_to_itself_takes_no_time() -> None:
    schedule = parse_schedule("0F0 1F0 1B0 0B0")
    programs = build_programs(Mesh(), schedule, _chain(2, size_bytes=1000))
    costs = CostTable((StageCost(1.0, 2.0),) * 2, p2p_latency_s=5.0, p2p_bytes_per_s=1.0)
    found = simulate(programs, costs)
    assert found.step_s == 6.0
    assert found.peak_bytes == (1000,)


def test_a_recomputed_micro_batch_holds_its_checkpoint_until_it_is_recomputed() -> None:
    stage = StageCost(1.0, 2.0, recompute_s=0.5, saved_bytes=10, checkpoint_bytes=1,
                      checkpoint_peak_bytes=4, recompute_peak_bytes=12)  # fmt: skip
    table = CostTable((stage,), 0.0, 1.0)
    for m, peak_bytes in ((1, 1 + 12), (3, 3 + 12)):
        programs = build_programs(Mesh(), make_schedule("gpipe", 1, m, recompute="full"), [])
        found = simulate(programs, table)
        assert found.step_s == 3.5 * m
        assert found.peak_bytes == (peak_bytes,)


def test_what_a_weight_gradient_reads_is_held_from_the_input_gradient_on() -> None:
    stage = StageCost(1.0, 0.0, saved_bytes=10, deferred_bytes=6, weight_peak_bytes=2)
    schedule = parse_schedule("0F0 0I0 0F1 0I1 0W0 0W1")
    found = simulate(build_programs(Mesh(), schedule, []), CostTable((stage,), 0.0, 1.0))
    assert found.peak_bytes == (6 + 10,)


def test_input_and_weight_gradients_apart() -> None:
    actions = [Action(F, 0, 0), Action(F, 0, 1), Action(I, 0, 0), Action(I, 0, 1)]
    actions += [Action(W, 0, 0), Action(W, 0, 1), Action(REDUCE, 0)]
    stage = StageCost(
        1.0, 99.0, input_grad_s=2.0, weight_grad_s=4.0, saved_bytes=10, input_grad_peak_bytes=3
    )
    found = simulate([Program(0, tuple(actions))], CostTable((stage,), 0.0, 1.0))
    assert found.step_s == 14.0
    assert found.peak_bytes == (23,)
    early = [Action(F, 0, 0), Action(I, 0, 0), Action(W, 0, 0)]
    early += [Action(F, 0, 1), Action(I, 0, 1), Action(W, 0, 1)]
    assert simulate([Program(0, tuple(early))], CostTable((stage,), 0.0, 1.0)).peak_bytes == (13,)


def test_simulate_verifies_first() -> None:
    programs = list(build_programs(Mesh(pp=3), make_schedule("1f1b", 3, 4), _chain(3)))
    programs[0] = Program(0, programs[0].actions[:1])
    with pytest.raises(ProgramError, match="no matching receive"):
        simulate(programs, _unit_costs(3))


# --- collectives over dp ---------------------------------------------------------------------

MARK = CollectiveKind


def _marked(kind: ActionKind, *marks: tuple[CollectiveKind, str, float], stage: int = 0) -> Action:
    return Action(kind, stage, collectives=tuple(Collective(k, b, "n", at) for k, b, at in marks))


def _seconds(**found: float) -> dict[tuple[str, CollectiveKind], float]:
    """`a_gather=2.0`: the gather of bucket a takes 2 s."""
    keys = {name: tuple(name.split("_")) for name in found}
    return {(keys[n][0], MARK(keys[n][1])): seconds for n, seconds in found.items()}


def test_what_a_compute_hides_is_not_exposed() -> None:
    program = Program(0, (
        _marked(ActionKind.GATHER, (MARK.GATHER, "a", 0.0)),
        _marked(F, (MARK.WAIT, "a", 0.0), (MARK.GATHER, "b", 0.0), (MARK.WAIT, "b", 0.5)),
        _marked(B, (MARK.REDUCE, "b", 0.5), (MARK.REDUCE, "a", 1.0)),
        Action(REDUCE, 0),
    ))  # fmt: skip
    costs = CostTable(
        (StageCost(4.0, 8.0, reduce_s=0.25),), 0.0, 1.0,
        collective_s=_seconds(a_gather=1.0, b_gather=3.0, b_reduce=5.0, a_reduce=2.0),
    )  # fmt: skip
    found = simulate([program], costs)
    # 1 s for a; b's gather is hidden for 2 s of 3; b's reduction for 4 of 5, then a's.
    assert found.exposed_s == (1.0 + 1.0 + (1.0 + 2.0),)
    assert found.communication_s == (11.0,)
    assert found.step_s == 4.0 + 8.0 + 0.25 + found.exposed_s[0]
    assert found.busy_s == (found.step_s,)
    assert [(e.label, e.start_s, e.end_s) for e in found.collectives] == [
        ("gather a", 0.0, 1.0), ("gather b", 1.0, 4.0), ("reduce b", 10.0, 15.0),
        ("reduce a", 15.0, 17.0),
    ]  # fmt: skip
    assert [e.label for e in found.events] == ["gather 0", "0F0", "0B0", "reduce 0"]
    waits = [("gather a", 0.0, 1.0), ("gather b", 3.0, 4.0)]  # in computes alone
    assert [(e.label, e.start_s, e.end_s) for e in found.waits] == waits
    slower = simulate([program], replace(costs, overlap=0.0))
    assert slower.exposed_s == (11.0,)


def test_waiting_for_a_message_hides_collectives() -> None:
    programs = _two_ranks(
        [Action(F, 0), _message(SEND, "a", 0)],
        [
            _marked(ActionKind.GATHER, (MARK.REFRESH, "b", 0.0), stage=1),
            _message(RECV, "a", 0),
            _marked(F, (MARK.WAIT, "b", 0.0), stage=1),
        ],
    )
    costs = CostTable(
        (StageCost(3.0, 0.0),) * 2, 0.0, 1.0, collective_s=_seconds(b_refresh=2.5), overlap=0.1
    )
    found = simulate(programs, costs)
    assert (found.step_s, found.exposed_s) == (6.0, (0.0, 0.0))


def test_the_walk_is_that_of_the_cost_model() -> None:
    """A stage of equal buckets, each read and made in its own piece of a compute."""
    layers, micro_batches = 4, 3
    group = DpGroup(8, Fabric(8, 1e9, 1e9, 0.0, 0.0), overlap=0.5)
    expected = state_cost(
        [Layer(10**9, 1.0, 2.0)] * layers, micro_batches, StateShards(1, 8, 8), group
    )
    seconds = collective_seconds(10**9, StateShards(1, 8, 8), group)
    names = [f"0:{k}" for k in range(layers)]
    actions = [_marked(ActionKind.GATHER, *((MARK.REFRESH, n, 0.0) for n in names))]
    for j in range(micro_batches):
        waits = [(MARK.WAIT, n, k / layers) for k, n in enumerate(names)] if j == 0 else []
        kind = MARK.REDUCE if j == micro_batches - 1 else MARK.SCATTER
        made = [(kind, n, (k + 1) / layers) for k, n in enumerate(reversed(names))]
        actions += [replace(_marked(F, *waits), micro_batch=j),
                    replace(_marked(B, *made), micro_batch=j)]  # fmt: skip
    table = CostTable(
        (StageCost(4.0, 8.0),), 0.0, 1.0, overlap=0.5,
        collective_s={(n, kind): s for n in names for kind, s in seconds.items()},
    )  # fmt: skip
    found = simulate([Program(0, (*actions, Action(REDUCE, 0)))], table)
    assert found.step_s == pytest.approx(expected.step_s)
    assert found.exposed_s == pytest.approx((expected.exposed_s,))
    assert found.communication_s == pytest.approx((expected.communication_s,))
    assert expected.exposed_s > 0


def test_reduced_gradients_stand_in_the_place_of_the_others() -> None:
    program = Program(0, (Action(F, 0), Action(B, 0), Action(REDUCE, 0)))
    stage = StageCost(1.0, 2.0, saved_bytes=5, forward_peak_bytes=5, static_bytes=100)
    for more, peak_bytes in ((3, 105), (20, 120), (-50, 105)):
        table = CostTable((replace(stage, reduced_bytes=more),), 0.0, 1.0)
        found = simulate([program], table)
        assert found.peak_bytes == (peak_bytes,)
        assert found.memory[-1].live_bytes == 100 + more


def test_collectives_inside_computes_are_where_their_graphs_have_them() -> None:
    programs = build_programs(Mesh(pp=2), make_schedule("1f1b", 2, 1, recompute=[0]), _chain(2))
    own = GraphCollective("all_reduce", "tp", 8, 0.25, 0.75, 0.5, 0.75)
    kinds = {(0, F, True), (0, ActionKind.RECOMPUTE, False), (1, F, False), (1, B, False)}
    table = replace(
        _unit_costs(2, recompute_s=1),
        collectives={of: (replace(own, size_bytes=k),) for k, of in enumerate(sorted(kinds))},
    )
    found = simulate(programs, table)
    assert len(found.collectives_inside([0, 1])) == 4
    (first, again) = found.collectives_inside([0])
    size_bytes = {of: k for k, of in enumerate(sorted(kinds))}
    assert first == CollectiveEvent(
        0, "all_reduce", "tp", size_bytes[0, F, True], 0.25, 0.25, 0.75, 0.5, 0.75
    )
    assert again.size_bytes == size_bytes[0, ActionKind.RECOMPUTE, False]
    backward = next(e for e in found.events if e.label == "1B0")
    assert found.collectives_inside([1])[1].end_s == backward.start_s + 0.75 * 2.0

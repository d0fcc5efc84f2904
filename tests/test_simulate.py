"""The check of Programs, and the simulated times and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merakc.errors import ProgramError
from merakc.ir.costs import CostTable, StageCost
from merakc.ir.program import Action, ActionKind, Event, Mesh, Program, Transfer
from merakc.passes.schedule import build_programs
from merakc.simulate import Simulation, simulate, verify_programs

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
    programs = build_programs(Mesh(pp=stages), schedule, micro_batches, _chain(stages))
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


def test_link_is_shared_in_order_and_latency_is_added() -> None:
    programs = _two_ranks(
        [Action(F, 0), Action(SEND, 0, 0, "a", 1, 30), Action(SEND, 0, 0, "b", 1, 10)],
        [Action(RECV, 1, 0, "a", 0, 30), Action(RECV, 1, 0, "b", 0, 10), Action(F, 1)],
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
    programs = build_programs(Mesh(dp=2, pp=2), "gpipe", 1, _chain(2))
    costs = CostTable(
        (StageCost(1.0, 2.0, reduce_s=0.25), StageCost(10.0, 20.0, reduce_s=7.0)), 0.0, 1.0
    )
    found = simulate(programs, costs)
    assert found.busy_s == (3.25, 37.0, 3.25, 37.0)
    assert found.step_s == 38.0


def test_64_stages_256_micro_batches_are_quick() -> None:
    programs = build_programs(Mesh(pp=64), "1f1b", 256, _chain(64))
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
    programs = build_programs(Mesh(pp=2), "gpipe", 1, _chain(2, size_bytes=8))
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
    programs = build_programs(Mesh(pp=2), "1f1b", 5, transfers)
    stage = StageCost(1.0, 2.0, saved_bytes=10, forward_peak_bytes=10)
    # two micro-batches in flight, one gradient received, the last message sent under way
    found = simulate(programs, CostTable((stage,) * 2, 0.0, 100.0))
    assert found.peak_bytes[0] == 2 * 10 + 100 + 100


def test_sent_payloads_pile_up_on_a_slow_link_alone() -> None:
    programs = build_programs(Mesh(pp=2), "gpipe", 4, _chain(2, size_bytes=100), forward_only=True)
    for bytes_per_s, peak_bytes in ((100.0, 100), (1.0, 400)):
        costs = CostTable((StageCost(1.0, 0.0, saved_bytes=7),) * 2, 0.0, bytes_per_s)
        assert simulate(programs, costs).peak_bytes == (peak_bytes, 100)


def test_input_and_weight_gradients_apart() -> None:
    actions = [Action(F, 0, 0), Action(F, 0, 1), Action(I, 0, 0), Action(I, 0, 1)]
    actions += [Action(W, 0, 0), Action(W, 0, 1), Action(REDUCE, 0)]
    stage = StageCost(
        1.0, 99.0, input_grad_s=2.0, weight_grad_s=4.0, saved_bytes=10, backward_peak_bytes=3
    )
    found = simulate([Program(0, tuple(actions))], CostTable((stage,), 0.0, 1.0))
    assert found.step_s == 14.0
    assert found.peak_bytes == (23,)
    early = [Action(F, 0, 0), Action(I, 0, 0), Action(W, 0, 0)]
    early += [Action(F, 0, 1), Action(I, 0, 1), Action(W, 0, 1)]
    assert simulate([Program(0, tuple(early))], CostTable((stage,), 0.0, 1.0)).peak_bytes == (13,)


# --- the check -----------------------------------------------------------------------------


def _programs() -> list[Program]:
    transfers = [Transfer("a", 0, 1, 8, True), Transfer("b", 0, 1, 8, False)]
    transfers += [Transfer("c", 1, 2, 8, True)]
    return list(build_programs(Mesh(pp=3), "1f1b", 4, transfers))


def _edit(rank: int, change: Callable[[list[Action]], None]) -> list[Program]:
    programs = _programs()
    actions = list(programs[rank].actions)
    change(actions)
    programs[rank] = Program(rank, tuple(actions))
    return programs


def _index(actions: list[Action], text: str) -> int:
    return [str(a) for a in actions].index(text)


def _drop(text: str) -> Callable[[list[Action]], None]:
    def change(actions: list[Action]) -> None:
        del actions[_index(actions, text)]

    return change


def _move(text: str, before: str) -> Callable[[list[Action]], None]:
    def change(actions: list[Action]) -> None:
        action = actions.pop(_index(actions, text))
        actions.insert(_index(actions, before), action)

    return change


def _put(text: str, **fields: object) -> Callable[[list[Action]], None]:
    def change(actions: list[Action]) -> None:
        k = _index(actions, text)
        actions[k] = replace(actions[k], **fields)  # type: ignore[arg-type]

    return change


def test_unbroken_programs_pass() -> None:
    verify_programs(_programs())


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (0, _drop("send 0F2 a -> 1"), r"rank 1, recv 1F2 a <- 0: rank 0 has no matching send"),
        (2, _drop("recv 2F1 c <- 1"), r"rank 1, send 1F1 c -> 2: rank 2 has no matching receive"),
        (
            0,
            _move("send 0F1 b -> 1", before="send 0F1 a -> 1"),
            r"rank 0, send 0F1 b -> 1: message 2 .* expects 'recv 1F1 a <- 0'; .* same order",
        ),
        (0, _put("send 0F0 a -> 1", size_bytes=4), r"sends 4 bytes, but rank 1, .* expects 8"),
        (0, _put("send 0F0 a -> 1", peer=3), r"rank 0, send 0F0 a -> 3: rank 3 is no peer"),
        (0, _put("send 0F0 a -> 1", peer=0), r"rank 0, send 0F0 a -> 0: rank 0 is no peer"),
        (2, _drop("2B1"), r"rank 2, 2B1: is missing"),
        (2, _drop("2F3"), r"rank 2, 2B3: stands before its forward"),
        (1, _drop("reduce 1"), r"rank 1, reduce 1: is missing"),
        (1, _put("1F1", micro_batch=0), r"rank 1, 1F0: runs a second time"),
        (1, _put("1B1", micro_batch=0), r"rank 1, 1B0: runs a second time"),
        (2, _move("2B2", before="2F2"), r"rank 2, 2B2: stands before its forward"),
        (0, _move("reduce 0", before="0B3"), r"rank 0, 0B3: stands after the reduction"),
        (1, _put("1B2", kind=I), r"rank 1, 1W2: is missing"),
        (1, _put("1B2", kind=W), r"rank 1, 1W2: stands before its input gradient"),
        (1, lambda a: a.insert(_index(a, "1B0"), Action(I, 1, 0)), r"rank 1, 1B0: its gradients"),
        (1, lambda a: a.insert(-1, Action(I, 1, 0)), r"rank 1, 1I0: its gradients are made"),
    ],
)
def test_broken_programs_are_refused(
    rank: int, change: Callable[[list[Action]], None], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        verify_programs(_edit(rank, change))


def test_whole_forward_missing_is_refused() -> None:
    programs = [Program(0, (Action(F, 0, 0), Action(F, 0, 1))), Program(1, (Action(F, 1, 1),))]
    with pytest.raises(ProgramError, match="rank 1, 1F0: is missing"):
        verify_programs(programs)


def test_two_programs_of_a_rank_are_refused() -> None:
    with pytest.raises(ProgramError, match="rank 0 has 2 programs"):
        verify_programs([Program(0, ()), Program(0, ())])


def test_receive_cycle_is_named() -> None:
    programs = _edit(0, _move("recv 0B0 a <- 1", before="send 0F0 a -> 1"))
    with pytest.raises(ProgramError) as caught:
        verify_programs(programs)
    assert str(caught.value) == (
        "deadlock, each rank waits for the next: rank 0 waits at 'recv 0B0 a <- 1'; "
        "rank 1 waits at 'recv 1F0 a <- 0'"
    )


def test_simulate_verifies_first() -> None:
    with pytest.raises(ProgramError, match="no matching send"):
        simulate(_edit(0, _drop("send 0F2 a -> 1")), _unit_costs(3))

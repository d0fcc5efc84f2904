"""The messages around orders of work."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merakc.errors import ConfigError
from merakc.ir.program import Action, ActionKind, Mesh, Program, Transfer
from merakc.passes.programs.schedule import build_programs
from merakc.schedules.registry import make_schedule
from merakc.schedules.text import parse_schedule
from merakc.simulation.faults import verify_programs
from tests.passes.random_schedules import random_schedule

F = ActionKind.FORWARD


def test_a_schedule_of_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="'1f1b' is for 2 pipeline ranks, the mesh has 3"):
        build_programs(Mesh(pp=3), make_schedule("1f1b", 2, 2), ())


ENCODER_DECODER = (
    Transfer("mask", 0, 1, 4, grad=False),
    Transfer("encoded", 0, 1, 8, grad=True),
    Transfer("encoded", 0, 2, 8, grad=True),
    Transfer("hidden", 1, 2, 16, grad=True),
)


def test_programs_text() -> None:
    programs = build_programs(Mesh(pp=3), make_schedule("1f1b", 3, 1), ENCODER_DECODER)
    assert [str(p) for p in programs] == [
        "rank 0: 0F0; send 0F0 mask -> 1; send 0F0 encoded -> 1; send 0F0 encoded -> 2; "
        "recv 0B0 encoded <- 1; recv 0B0 encoded <- 2; 0B0; reduce 0",
        "rank 1: recv 1F0 mask <- 0; recv 1F0 encoded <- 0; 1F0; send 1F0 hidden -> 2; "
        "recv 1B0 hidden <- 2; 1B0; send 1B0 encoded -> 0; reduce 1",
        "rank 2: recv 2F0 encoded <- 0; recv 2F0 hidden <- 1; 2F0; 2B0; "
        "send 2B0 encoded -> 0; send 2B0 hidden -> 1; reduce 2",
    ]
    assert programs[0].actions[1] == Action(ActionKind.SEND, 0, 0, "mask", 1, 4, peer_stage=1)


def test_forward_only() -> None:
    programs = build_programs(
        Mesh(pp=2), make_schedule("1f1b", 2, 2), ENCODER_DECODER[:2], forward_only=True
    )
    kinds = {a.kind for p in programs for a in p.actions}
    assert kinds == {F, ActionKind.SEND, ActionKind.RECV}
    assert not any(a.is_grad for p in programs for a in p.actions)
    verify_programs(programs)


def test_peers_share_dp_and_tp_coordinates() -> None:
    mesh = Mesh(dp=2, tp=3, pp=3)
    programs = build_programs(mesh, make_schedule("gpipe", 3, 2), ENCODER_DECODER)
    assert [p.rank for p in programs] == list(range(18))
    verify_programs(programs)
    for program in programs:
        dp, stage, tp = mesh.coordinates(program.rank)
        assert {a.stage for a in program.actions} == {stage}
        peers = {mesh.coordinates(a.peer) for a in program.actions if a.value}
        assert {(d, t) for d, _, t in peers} == {(dp, tp)}
        assert {s for _, s, _ in peers} == {0, 1, 2} - {stage}


def test_stages_of_one_rank_hand_over_in_memory() -> None:
    chain = [Transfer(f"h{s}", s, s + 1, 8, True) for s in range(3)]
    schedule = parse_schedule("0F0 3F0 3I0 3W0 0B0; 1F0 2F0 2B0 1B0")
    programs = build_programs(Mesh(pp=2), schedule, chain)
    verify_programs(programs)
    assert [str(p) for p in programs] == [
        "rank 0: 0F0; send 0F0 h0 -> 1; recv 3F0 h2 <- 1; 3F0; 3I0; send 3B0 h2 -> 1; 3W0; "
        "recv 0B0 h0 <- 1; 0B0; reduce 0; reduce 3",
        "rank 1: recv 1F0 h0 <- 0; 1F0; send 1F0 h1 -> 1; recv 2F0 h1 <- 1; 2F0; "
        "send 2F0 h2 -> 0; recv 2B0 h2 <- 0; 2B0; send 2B0 h1 -> 1; recv 1B0 h1 <- 1; 1B0; "
        "send 1B0 h0 -> 0; reduce 1; reduce 2",
    ]


def test_receives_stand_in_the_order_of_the_sends() -> None:
    schedule = parse_schedule("0F0 0F1 0B1 0B0; 1F1 1F0 1B0 1B1")
    (_, second) = build_programs(Mesh(pp=2), schedule, [Transfer("h", 0, 1, 8, True)])
    assert str(second) == (
        "rank 1: recv 1F0 h <- 0; recv 1F1 h <- 0; 1F1; 1F0; 1B0; send 1B0 h -> 0; 1B1; "
        "send 1B1 h -> 0; reduce 1"
    )


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Mesh, list[int], list[Transfer], int, int]:
    pp = draw(st.integers(1, 4))
    rank_of = [*range(pp), *draw(st.lists(st.integers(0, pp - 1), max_size=4))]
    rank_of = draw(st.permutations(rank_of))
    pairs = [(a, b) for b in range(len(rank_of)) for a in range(b)]
    transfers = []
    if pairs:
        chosen = draw(st.lists(st.tuples(st.sampled_from(pairs), st.booleans()), max_size=8))
        transfers = [Transfer(f"v{k}", *pair, 8, grad) for k, (pair, grad) in enumerate(chosen)]
    mesh = Mesh(dp=draw(st.integers(1, 2)), pp=pp)
    return mesh, rank_of, transfers, draw(st.integers(1, 5)), draw(st.integers(0, 2**32))


@given(_cases())
def test_any_order_and_transfers_give_programs_that_verify(
    case: tuple[Mesh, list[int], list[Transfer], int, int],
) -> None:
    mesh, rank_of, transfers, micro_batches, seed = case
    schedule = random_schedule(rank_of, micro_batches, transfers, random.Random(seed))
    programs = build_programs(mesh, schedule, transfers)
    verify_programs(programs)
    for program in programs:
        _check_messages_stand_around_their_compute(program, transfers, micro_batches)
        computed = tuple(a for a in program.actions if a.kind.is_compute)
        assert computed == schedule.orders[mesh.coordinates(program.rank)[1]]


def _check_messages_stand_around_their_compute(
    program: Program, transfers: list[Transfer], micro_batches: int
) -> None:
    computed: set[tuple[bool, int, int]] = set()
    messages: dict[tuple[int, bool, bool, int], list[str]] = defaultdict(list)
    for action in program.actions:
        work = action.stage, action.micro_batch
        if action.kind is F:
            computed.add((False, *work))
        elif action.kind.sends_gradients:
            computed.add((True, *work))
        elif action.value:
            done = (action.is_grad, *work) in computed
            assert done is (action.kind is ActionKind.SEND)
            messages[action.stage, done, action.is_grad, action.micro_batch].append(action.value)
    for stage in {a.stage for a in program.actions}:
        into = [t for t in transfers if t.target_stage == stage]
        out = [t for t in transfers if t.source_stage == stage]
        for j in range(micro_batches):
            assert sorted(messages[stage, False, False, j]) == [t.value for t in into]
            assert messages[stage, True, False, j] == [t.value for t in out]
            assert sorted(messages[stage, False, True, j]) == [t.value for t in out if t.grad]
            assert messages[stage, True, True, j] == [t.value for t in into if t.grad]

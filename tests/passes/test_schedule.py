"""Orders of work, and the messages around them."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merakc.errors import ConfigError
from merakc.ir.program import Action, ActionKind, Mesh, Program, Transfer
from merakc.passes.schedule import build_programs, compute_order
from merakc.simulate import verify_programs

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def _text(schedule: str, stage: int, stages: int, micro_batches: int) -> str:
    order = compute_order(schedule, stage, stages, micro_batches)
    return " ".join(f"{kind}{j}" for kind, j in order)


def test_gpipe_order() -> None:
    assert _text("gpipe", 1, 3, 3) == "F0 F1 F2 B0 B1 B2"


def test_1f1b_order() -> None:
    assert _text("1f1b", 0, 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert _text("1f1b", 1, 3, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert _text("1f1b", 2, 3, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_1f1b_order_with_fewer_micro_batches_than_stages() -> None:
    assert _text("1f1b", 0, 4, 2) == "F0 F1 B0 B1"


def test_unknown_schedule_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="'zb' is not known; choose one of 1f1b, gpipe"):
        compute_order("zb", 0, 2, 2)


def test_no_micro_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batches is 0"):
        build_programs(Mesh(), "gpipe", 0, ())


ENCODER_DECODER = (
    Transfer("mask", 0, 1, 4, grad=False),
    Transfer("encoded", 0, 1, 8, grad=True),
    Transfer("encoded", 0, 2, 8, grad=True),
    Transfer("hidden", 1, 2, 16, grad=True),
)


def test_programs_text() -> None:
    programs = build_programs(Mesh(pp=3), "1f1b", 1, ENCODER_DECODER)
    assert [str(p) for p in programs] == [
        "rank 0: 0F0; send 0F0 mask -> 1; send 0F0 encoded -> 1; send 0F0 encoded -> 2; "
        "recv 0B0 encoded <- 1; recv 0B0 encoded <- 2; 0B0; reduce 0",
        "rank 1: recv 1F0 mask <- 0; recv 1F0 encoded <- 0; 1F0; send 1F0 hidden -> 2; "
        "recv 1B0 hidden <- 2; 1B0; send 1B0 encoded -> 0; reduce 1",
        "rank 2: recv 2F0 encoded <- 0; recv 2F0 hidden <- 1; 2F0; 2B0; "
        "send 2B0 encoded -> 0; send 2B0 hidden -> 1; reduce 2",
    ]
    assert programs[0].actions[1] == Action(ActionKind.SEND, 0, 0, "mask", 1, 4)


def test_forward_only() -> None:
    programs = build_programs(Mesh(pp=2), "1f1b", 2, ENCODER_DECODER[:2], forward_only=True)
    kinds = {a.kind for p in programs for a in p.actions}
    assert kinds == {F, ActionKind.SEND, ActionKind.RECV}
    assert not any(a.is_grad for p in programs for a in p.actions)
    verify_programs(programs)


def test_peers_share_dp_and_tp_coordinates() -> None:
    mesh = Mesh(dp=2, tp=3, pp=3)
    programs = build_programs(mesh, "gpipe", 2, ENCODER_DECODER)
    assert [p.rank for p in programs] == list(range(18))
    verify_programs(programs)
    for program in programs:
        dp, stage, tp = mesh.coordinates(program.rank)
        assert {a.stage for a in program.actions} == {stage}
        peers = {mesh.coordinates(a.peer) for a in program.actions if a.value}
        assert {(d, t) for d, _, t in peers} == {(dp, tp)}
        assert {s for _, s, _ in peers} == {0, 1, 2} - {stage}


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Mesh, str, int, list[Transfer]]:
    pp = draw(st.integers(1, 5))
    pairs = [(a, b) for b in range(pp) for a in range(b)]
    transfers = []
    if pairs:
        chosen = draw(st.lists(st.tuples(st.sampled_from(pairs), st.booleans()), max_size=8))
        transfers = [Transfer(f"v{k}", *pair, 8, grad) for k, (pair, grad) in enumerate(chosen)]
    schedule = draw(st.sampled_from(["gpipe", "1f1b"]))
    return Mesh(dp=draw(st.integers(1, 2)), pp=pp), schedule, draw(st.integers(1, 6)), transfers


@given(_cases())
def test_any_transfers_give_programs_that_verify(
    case: tuple[Mesh, str, int, list[Transfer]],
) -> None:
    mesh, schedule, micro_batches, transfers = case
    programs = build_programs(mesh, schedule, micro_batches, transfers)
    verify_programs(programs)
    for program in programs:
        _check_messages_stand_around_their_compute(program, transfers)


def _check_messages_stand_around_their_compute(program: Program, transfers: list[Transfer]) -> None:
    stage = program.actions[0].stage
    computed: set[tuple[ActionKind, int]] = set()
    messages: dict[tuple[bool, int], list[str]] = defaultdict(list)
    for action in program.actions:
        if action.kind in (F, B):
            computed.add((action.kind, action.micro_batch))
        elif action.value:
            phase = B if action.is_grad else F
            done = (phase, action.micro_batch) in computed
            assert done is (action.kind is ActionKind.SEND)
            messages[done, action.is_grad].append(action.value)
    m = len(computed) // 2
    into = [t for t in transfers if t.target_stage == stage]
    out = [t for t in transfers if t.source_stage == stage]
    assert messages[False, False] == [t.value for t in into] * m
    assert messages[True, False] == [t.value for t in out] * m
    assert messages[False, True] == [t.value for t in out if t.grad] * m
    assert messages[True, True] == [t.value for t in into if t.grad] * m

"""The check of Programs: each fault is named, with its rank and action."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.mutated_orders import Faulty, Walk, mutated, refused
from merakc.errors import ProgramError
from merakc.ir.program import Action, ActionKind, Mesh, Program, Transfer
from merakc.passes.programs.schedule import build_programs
from merakc.schedules.planned import forwards_first
from merakc.schedules.registry import make_schedule
from merakc.schedules.text import parse_schedule
from merakc.simulation.faults import verify_programs
from tests.passes.random_schedules import random_schedule

F, B, I, W = (  # noqa: E741 - the field's own letters
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRAD,
    ActionKind.WEIGHT_GRAD,
)
R, HEAD = ActionKind.RECOMPUTE, ActionKind.HEAD


def _programs() -> list[Program]:
    transfers = [Transfer("a", 0, 1, 8, True), Transfer("b", 0, 1, 8, False)]
    transfers += [Transfer("c", 1, 2, 8, True)]
    return list(build_programs(Mesh(pp=3), make_schedule("1f1b", 3, 4), transfers))


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
        (
            0,
            _put("send 0F0 a -> 1", peer=0),
            r"rank 1, recv 1F0 a <- 0: rank 0 has no matching send",
        ),
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
        (1, lambda a: a.insert(0, Action(R, 1, 0)), r"rank 1, 1R0: stands before its forward"),
        (1, lambda a: a.insert(-1, Action(R, 1, 0)), r"rank 1, 1R0: stands after the backward"),
        (0, _move("send 0F0 a -> 1", before="0F0"), r"send 0F0 a -> 1: stands before the compute"),
        (0, _move("recv 0B3 a <- 1", before="reduce 0"), r"recv 0B3 a <- 1: stands after the"),
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


def test_what_all_other_micro_batches_exchange_is_missing() -> None:
    programs = _programs()
    dropped = {0: "send 0F1 b -> 1", 1: "recv 1F1 b <- 0"}
    for rank, text in dropped.items():
        actions = [a for a in programs[rank].actions if str(a) != text]
        programs[rank] = Program(rank, tuple(actions))
    with pytest.raises(ProgramError, match="micro-batch 1 is missing"):
        verify_programs(programs)


def test_a_rank_that_waits_for_itself() -> None:
    schedule = parse_schedule("0F0 1F0 1B0 0B0")
    (program,) = build_programs(Mesh(), schedule, [Transfer("h", 0, 1, 8, True)])
    verify_programs([program])
    actions = list(program.actions)
    _move("recv 1F0 h <- 0", before="0F0")(actions)
    with pytest.raises(ProgramError, match="rank 0 waits at 'recv 1F0 h <- 0'"):
        verify_programs([Program(0, tuple(actions))])


def _coupled(change: Callable[[list[Action]], None]) -> list[Program]:
    schedule = forwards_first(make_schedule("1f1b", 2, 3))
    transfers = [Transfer("a", 0, 1, 8, True)]
    programs = list(build_programs(Mesh(pp=2), schedule, transfers, head=1))
    actions = list(programs[1].actions)
    change(actions)
    return [programs[0], Program(1, tuple(actions))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("1head"), "rank 1, 1head: is missing"),
        (_move("1head", before="1F2"), "rank 1, 1head: stands before a forward of its stage"),
        (_move("1head", before="1B1"), "rank 1, 1head: stands after a backward of its stage"),
        (lambda a: a.insert(-4, Action(HEAD, 1)), "rank 1, 1head: runs a second time"),
        (_put("1head", stage=0), "rank 1, 0head: the samples are coupled by 1head, once"),
    ],
)
def test_what_couples_samples_runs_once_in_its_place(
    change: Callable[[list[Action]], None], message: str
) -> None:
    verify_programs(_coupled(lambda _: None), head=1)
    with pytest.raises(ProgramError, match=message):
        verify_programs(_coupled(change), head=1)


def test_every_rank_of_the_stage_runs_what_couples_samples() -> None:
    programs = list(build_programs(Mesh(dp=2), make_schedule("gpipe", 1, 2), (), head=0))
    verify_programs(programs)
    actions = [a for a in programs[1].actions if a.kind is not HEAD]
    with pytest.raises(ProgramError, match="rank 1, 0head: is missing"):
        verify_programs([programs[0], Program(1, tuple(actions))])


def test_mutated_orders_are_refused_or_run_to_their_end() -> None:
    draw = random.Random(0)
    counts = {"refused": 0, "ran": 0}
    for _ in range(1000):
        pp = draw.randint(1, 3)
        rank_of = [*range(pp), *draw.choices(range(pp), k=draw.randint(0, 2))]
        transfers = [Transfer(f"h{s}", s, s + 1, 8, True) for s in range(len(rank_of) - 1)]
        if len(rank_of) > 2:
            transfers.append(Transfer("h0", 0, 2, 8, True))
            transfers.append(Transfer("mask", 0, len(rank_of) - 1, 8, False))
        micro_batches = draw.randint(1, 3)
        schedule = random_schedule(rank_of, micro_batches, transfers, draw)
        head = draw.choice([None, *range(len(rank_of))])
        schedule = schedule if head is None else forwards_first(schedule)
        programs = mutated(schedule, transfers, draw, head)
        complaint = refused(programs, micro_batches, head)
        if complaint:
            assert "rank" in complaint
            counts["refused"] += 1
        else:
            Walk(programs, transfers, head).run(len(rank_of), micro_batches)
            counts["ran"] += 1
    assert counts["refused"] > 500
    assert counts["ran"] > 50


def test_orders_that_are_whole_run_to_their_end() -> None:
    draw = random.Random(1)
    transfers = [Transfer(f"h{s}", s, s + 1, 8, True) for s in range(3)]
    for _ in range(50):
        schedule = random_schedule([0, 1, 1, 0], 3, transfers, draw)
        programs = build_programs(Mesh(pp=2), schedule, transfers)
        assert not refused(programs, 3)
        Walk(programs, transfers).run(4, 3)
        first = [a for a in programs[0].actions if str(a) != "0F1"]
        broken = Walk([Program(0, tuple(first)), programs[1]], transfers)
        with pytest.raises(Faulty):
            broken.run(4, 3)

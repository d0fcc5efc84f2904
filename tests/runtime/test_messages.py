from __future__ import annotations

import time
import weakref

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import RankError, run_ranks
from merakc.analysis.calls import ways
from merakc.errors import StuckError
from merakc.ir.graph import TensorSpec
from merakc.ir.program import Action, ActionKind, Mesh, Program, Transfer
from merakc.passes.programs.schedule import build_programs
from merakc.runtime.groups import Groups
from merakc.runtime.messages import Messages, message_tags
from merakc.schedules.text import parse_schedule

CPU = torch.device("cpu")
SPECS = {(stage, name): TensorSpec((3,), torch.float64) for stage in range(4) for name in "ab"}
V_SHAPE = "0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1; 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"


def messages(text: str, timeout_s: float = 20.0) -> tuple[Program, Messages]:
    rank, mesh = dist.get_rank(), Mesh(pp=2)
    schedule = parse_schedule(text)
    chain = [Transfer("ab"[s % 2], s, s + 1, 24, True) for s in range(schedule.stages - 1)]
    program = build_programs(mesh, schedule, chain)[rank]
    channels = Groups(mesh, rank).channels(ways(schedule.rank_of, chain))
    return program, Messages(program, SPECS, CPU, channels, timeout_s)


def number(action: Action) -> torch.Tensor:
    """What a message carries here: which it is."""
    value, is_grad, micro_batch, source, target = action.message
    parts = [ord(value) + 100 * is_grad, micro_batch, 10 * source + target]
    return torch.tensor(parts, dtype=torch.float64)


def exchange() -> int:
    program, own = messages(V_SHAPE)
    received = 0
    for k, action in enumerate(program.actions):
        own.post_receives(k)
        if action.peer in (-1, program.rank):
            continue
        if action.kind is ActionKind.SEND:
            own.send(k, action, number(action))
        elif action.kind is ActionKind.RECV:
            assert torch.equal(own.receive(k, action), number(action)), action
            received += 1
    own.finish()
    return received


def test_every_message_arrives_as_itself_in_both_directions() -> None:
    assert run_ranks(2, exchange) == [4, 4]


def let_go() -> bool:
    program, own = messages("0F0 0B0; 1F0 1B0")
    position = next(k for k, a in enumerate(program.actions) if a.kind is ActionKind.SEND)
    action = program.actions[position]
    freed = False
    own.post_receives(0)
    if program.rank == 0:
        value = number(action)
        alive = weakref.ref(value)
        own.send(position, action, value)
        del value
        end_s = time.monotonic() + 60
        while not freed and time.monotonic() < end_s:
            freed = alive() is None
            time.sleep(0.01)
        own.receive(position + 1, program.actions[position + 1])
    else:
        own.receive(0, program.actions[0])
        own.send(position, action, number(action))
    own.finish()
    return freed


def test_what_has_been_received_is_let_go_of_before_the_step_ends() -> None:
    assert run_ranks(2, let_go)[0]


def wait_for_nothing(sends: bool) -> str:
    program, own = messages("0F0 0B0; 1F0 1B0", timeout_s=0.5)
    if program.rank != int(sends):
        return ""  # its process stays until all have returned
    try:
        if sends:
            position = next(k for k, a in enumerate(program.actions) if a.kind is ActionKind.SEND)
            own.send(position, program.actions[position], number(program.actions[position]))
            own.finish()
        else:
            position = next(k for k, a in enumerate(program.actions) if a.kind is ActionKind.RECV)
            own.post_receives(0)
            own.receive(position, program.actions[position])
    except StuckError as error:
        return str(error)
    return "did not wait"


def test_a_stuck_peer_is_named_with_the_action() -> None:
    waited, _ = run_ranks(2, wait_for_nothing, False)
    assert waited.startswith(
        "rank 0 waited at 'recv 0B0 a <- 1', action 2 of 5, after '0F0': rank 1 did not send it "
        "within 0.5 s, or has gone"
    )
    _, sent = run_ranks(2, wait_for_nothing, True)
    assert sent.startswith(
        "rank 1 waited at 'send 1B0 a -> 0', action 3 of 5, after '1B0': rank 0 did not take it"
    )


def gone() -> None:
    program, own = messages("0F0 0B0; 1F0 1B0")
    if program.rank == 1:
        raise ArithmeticError("a fault of rank 1's own")
    own.post_receives(0)
    own.receive(2, program.actions[2])


def test_the_rank_that_failed_is_the_one_that_is_told() -> None:
    with pytest.raises(RankError, match="a fault of rank 1's own") as caught:
        run_ranks(2, gone)
    assert caught.value.rank == 1


def test_tags_tell_messages_of_one_pair_apart() -> None:
    chain = [Transfer(f"h{s}", s, s + 1, 8, True) for s in range(3)]
    for program in build_programs(Mesh(pp=2), parse_schedule(V_SHAPE), chain):
        tags = message_tags(program)
        for kind in (ActionKind.SEND, ActionKind.RECV):
            for peer in (0, 1):
                own = [t for k, t in tags.items() if program.actions[k].kind is kind
                       and program.actions[k].peer == peer]  # fmt: skip
                assert len(set(own)) == len(own)

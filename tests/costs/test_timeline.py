"""The memory of a rank action by action, against a walk by hand."""

from __future__ import annotations

import pytest
import torch

from merakc.costs.timeline import program_memory, rank_times, verify_memory
from merakc.costs.work.memory import Sum
from merakc.costs.work.sharded import SunkGradients
from merakc.errors import ProgramError
from merakc.ir.costs import CostTable, StageCost
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import Mesh, StageGraphs, Transfer
from merakc.passes.autodiff.recompute import checkpointed
from merakc.passes.pipeline import differentiate
from merakc.passes.programs.schedule import build_programs
from merakc.schedules.text import parse_schedule
from merakc.simulation.simulate import simulate

WIDTH = 8
SIZE = 4 * WIDTH * 8  # of a value, float64 [4, WIDTH]
WEIGHT = WIDTH * WIDTH * 8


def stage(name: str, received: str, width: int = WIDTH) -> StageGraphs:
    """`name` = sin(`received` w): it saves its product, and what it has received."""
    spec = TensorSpec((4, WIDTH), torch.float64)
    kind = InputKind.BATCH if received == "batch" else InputKind.ACTIVATION
    source = TensorSpec((4, width), torch.float64)
    given = Input(received, kind, source, received, kind is InputKind.ACTIVATION)
    weight = Input(f"w{name}", InputKind.PARAMETER, TensorSpec((width, WIDTH), torch.float64),
                   f"w{name}", True)  # fmt: skip
    nodes = (
        Node("mm", "aten.mm.default", (Ref(received), Ref(weight.name)), (), (spec,)),
        Node("sin", "aten.sin.default", (Ref("mm"),), (), (spec,)),
    )
    output = Output(name, OutputKind.ACTIVATION, Ref("sin"))
    return differentiate(Graph((given, weight), nodes, (output,)))


CHUNKS = {0: stage("a", "batch"), 1: stage("b", "a"), 2: stage("c", "b")}
CHAIN = [Transfer("a", 0, 1, SIZE, True), Transfer("b", 1, 2, SIZE, True)]


def walk(text: str, rank: int = 0, chunks: dict[int, StageGraphs] = CHUNKS) -> dict[str, int]:
    """Live values, in units of one, after each compute."""
    schedule = parse_schedule(text)
    programs = build_programs(Mesh(pp=schedule.ranks), schedule, CHAIN)
    stages = {a.stage for a in programs[rank].actions}
    found = program_memory(programs[rank], {s: chunks[s] for s in stages}, 1000)
    assert all(m.peak_bytes >= m.live_bytes for m in found)
    grads = dict.fromkeys(stages, 0)
    live = {}
    for memory in found:
        if str(memory.action)[1] == "B":
            grads[memory.action.stage] = WEIGHT
        if memory.action.kind.is_compute:
            live[str(memory.action)] = (memory.live_bytes - 1000 - sum(grads.values())) / SIZE
    return {k: int(v) for k, v in live.items() if v == int(v)} | {
        k: -1 for k, v in live.items() if v != int(v)
    }


def test_what_a_middle_stage_holds() -> None:
    # Receives of the next two computes are posted ahead: an activation, or a gradient, each.
    assert walk("0F0 0F1 0B0 0B1; 1F0 1F1 1B0 1B1; 2F0 2F1 2B0 2B1", rank=1) == {
        "1F0": 3 + 1,  # its product and input, the next input, and what is still to be sent
        "1F1": 2 + 2 + 1 + 1,
        "1B0": 2 + 1 + 1 + 1 - 1 + 0,
        "1B1": 1,
    }


def test_stages_of_one_rank_share_what_they_hand_over() -> None:
    found = walk("0F0 1F0 2F0 2B0 1B0 0B0")
    # The output of one stage is the input of the next, and in memory once.
    assert found == {"0F0": 2, "1F0": 4, "2F0": 5, "2B0": 4, "1B0": 2, "0B0": 0}


def test_a_checkpoint_holds_the_input_alone() -> None:
    chunks = {s: checkpointed(c, ()) for s, c in CHUNKS.items()}
    found = walk("0F0 1F0 2F0 2R0 2B0 1R0 1B0 0R0 0B0", chunks=chunks)
    assert found["0F0"] == 1
    assert found["1F0"] == 2
    assert found["2R0"] == found["2F0"] + 1


@pytest.mark.parametrize("latency_s", [0.0, 10.0])
def test_a_message_is_held_until_its_receive_is_posted(latency_s: float) -> None:
    schedule = parse_schedule("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3; "
                              "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3")  # fmt: skip
    programs = build_programs(Mesh(pp=2), schedule, CHAIN[:1])
    costs = StageCost(1.0, 2.0), StageCost(8.0, 8.0)
    events = simulate(programs, CostTable(costs, latency_s, float("inf"))).events
    times = rank_times(programs, events)
    sends = [k for k, a in enumerate(programs[0].actions) if a.kind == "send"]
    left_s = [times[0].left_s[k] for k in sends]
    # The third is taken when the second forward of rank 1 begins, which is 8 s after its first.
    start_s = 1.0 + latency_s
    assert left_s == [1.0, 2.0, start_s + 8.0, start_s + 16.0]
    slow = program_memory(programs[0], {0: CHUNKS[0]}, 0, times[0])
    fast = program_memory(programs[0], {0: CHUNKS[0]}, 0)
    extra = [a.live_bytes - b.live_bytes for a, b in zip(slow, fast, strict=True)]
    assert max(extra) == 2 * SIZE
    assert extra[-1] == 0


def test_a_cap_that_is_exceeded_is_refused_with_the_action() -> None:
    schedule = parse_schedule("0F0 0F1 0F2 0B0 0B1 0B2")
    (program,) = build_programs(Mesh(), schedule, [])
    memory = program_memory(program, {0: CHUNKS[0]}, 0)
    peak_bytes = max(m.peak_bytes for m in memory)
    verify_memory(0, memory, peak_bytes)
    first = memory[0].peak_bytes
    with pytest.raises(ProgramError, match="rank 0, 0F1, action 1 of 7: needs"):
        verify_memory(0, memory, first)


@pytest.mark.parametrize("is_scattered", [False, True])
def test_gradients_that_are_sunk_are_alive_in_their_sums(is_scattered: bool) -> None:
    """A sum is there from the first gradient on; one that is scattered leaves its shard behind."""
    schedule = parse_schedule("0F0 0B0 0F1 0B1")
    (program,) = build_programs(Mesh(), schedule, [])
    plain = [m.live_bytes for m in program_memory(program, {0: CHUNKS[0]}, 0)]
    assert plain[1] == plain[4] == WEIGHT
    total, shard = 100 * WEIGHT, 7 if is_scattered else 0
    sunk = SunkGradients((Sum(frozenset({"wa"}), total, is_scattered),), shard, 3)
    found = program_memory(program, {0: CHUNKS[0]}, 0, None, {0: sunk})
    held = shard or total
    forward = plain[0]
    assert [m.live_bytes for m in found] == [forward, held, forward + held, held, 3]
    full = [m.peak_bytes >= total for m in found]
    assert full == [False, True, not is_scattered, True, not is_scattered]
    # The second time it is filled again, or there already, beside what the product is made of.
    before = 0 if is_scattered else 2 * SIZE
    assert found[3].peak_bytes - found[1].peak_bytes == before


def test_later_gradients_are_added_where_the_first_ones_are() -> None:
    """So that they take nothing, unless computes are fused and give them out."""
    chunks, weight = {0: stage("a", "batch", 2 * WIDTH)}, 2 * WEIGHT
    (program,) = build_programs(Mesh(), parse_schedule("0F0 0B0 0F1 0B1"), [])
    plain, fused = (program_memory(program, chunks, 0, fused=f) for f in (False, True))
    assert [m.live_bytes for m in plain] == [m.live_bytes for m in fused]
    made = [(m.peak_bytes, f.peak_bytes) for m, f in zip(plain, fused, strict=True)]
    assert made[1] == (weight, weight)  # what it is made of was there before
    assert made[3] == (weight + 2 * SIZE, 2 * weight)

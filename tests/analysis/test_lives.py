"""The lives of a rank's memory against what the executor's memory is predicted to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from merakc.analysis.lives import Life, most_alive, step_lives
from merakc.costs.timeline import program_memory
from merakc.costs.work.memory import Sum
from merakc.costs.work.sharded import SunkGradients
from merakc.ir.graph import Graph, Node, OutputKind, Ref, TensorSpec
from merakc.ir.program import Mesh, StageGraphs
from merakc.lowering.lowered import Lowered
from merakc.passes.autodiff.recompute import checkpointed
from merakc.passes.programs.schedule import build_programs
from merakc.schedules.text import parse_schedule
from tests.costs.test_timeline import CHAIN, CHUNKS, SIZE
from tests.report.made import coupled, lowered, recording


def of_rank(text: str, rank: int = 0, chunks: dict[int, StageGraphs] = CHUNKS) -> tuple[Life, ...]:
    schedule = parse_schedule(text)
    program = build_programs(Mesh(pp=schedule.ranks), schedule, CHAIN)[rank]
    return step_lives(program, {s: chunks[s] for s in {a.stage for a in program.actions}})


def lines(lives: tuple[Life, ...]) -> list[str]:
    return [f"{own.name} {own.size_bytes // SIZE} {own.start}-{own.stop}" for own in lives]


def test_the_lives_of_a_middle_stage() -> None:
    # Both receives are posted with the first action; the sine is sent, its cosine is what is saved.
    assert lines(of_rank("0F0 0B0; 1F0 1B0; 2F0 2B0", rank=1)) == [
        "recv 1F0 a <- 0 1 1-12",
        "recv 1B0 b <- 2 1 1-10",
        "1F0 j:mm 1 3-5",
        "1F0 j:sin 1 4-7",
        "1F0 j:cos 1 5-10",
        "1B0 j:mul 1 10-14",  # by the gradient of the weight and that of the input, then it returns
        "1B0 j:mm_2 1 14-16",
    ]


def test_what_stages_of_a_rank_hand_over_is_one_memory() -> None:
    names = [own.name for own in of_rank("0F0 1F0 2F0 2B0 1B0 0B0")]
    assert not [name for name in names if name.startswith("recv")]
    assert len(names) == len(set(names))


def test_a_sum_of_gradients_of_several_stages_is_a_life_of_its_own() -> None:
    transfers = [*CHAIN, replace(CHAIN[0], target_stage=2)]
    schedule = parse_schedule("0F0 0B0; 1F0 1B0; 2F0 2B0")
    program = build_programs(Mesh(pp=3), schedule, transfers)[0]
    found = step_lives(program, {0: CHUNKS[0]})
    (total,) = (own for own in found if own.name == "gradient of a 0")
    parts = [own for own in found if own.name.startswith("recv")]
    assert len(parts) == 2
    assert all(own.stop == total.start for own in parts)


PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": Mesh()},
    "1f1b": {"mesh": Mesh(pp=2)},
    "zb-h1": {"mesh": Mesh(pp=2), "schedule": "zb-h1"},
    "zb-v": {"mesh": Mesh(pp=2), "schedule": "zb-v"},
    "tp": {"mesh": Mesh(tp=2)},
    "by stage": {"mesh": Mesh(pp=2), "recompute": "stage"},
    "by block": {"mesh": Mesh(), "recompute": "full"},
}


def peaks(made: Lowered) -> list[tuple[int, int]]:
    """Of each rank what is most alive, and its predicted peak, where gradients of parameters lie in
    sums that take nothing.
    """
    found = []
    for program in made.programs():
        chunks = made.rank_graphs(program.rank)
        sunk = {}
        for stage, chunk in chunks.items():
            names = frozenset(i.target for i in chunk.forward.inputs)
            sunk[stage] = SunkGradients((Sum(names, 0),), 0, 0)
        memory = program_memory(program, chunks, 0, None, sunk)
        alive = most_alive(step_lives(program, chunks))
        found.append((alive, max(m.peak_bytes for m in memory)))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_the_most_alive_is_the_predicted_peak(name: str) -> None:
    """Without pipeline ranks, which have the tied table of GPT-2 apart, its gradient is no output
    of a call that adds to a sum: what is predicted counts it, and here it lies elsewhere.
    """
    mesh = PLANS[name]["mesh"]
    table = 0 if mesh.pp > 1 else max(i.spec.size_bytes for i in recording().graph.inputs)
    for alive, peak in peaks(lowered(**PLANS[name])):
        assert peak - table <= alive <= peak


def test_a_head_reads_what_all_micro_batches_have_handed_over() -> None:
    made = coupled()
    program = made.programs()[-1]
    found = step_lives(program, made.rank_graphs(program.rank))
    assert any(own.name.startswith("gradient of") for own in found)


def test_what_is_given_to_users_is_no_part_of_it() -> None:
    chunk = CHUNKS[0]
    spec = TensorSpec((4, 8), chunk.forward.nodes[0].spec.dtype)
    more = Node("own", "aten.cos.default", (Ref("j:mm"),), (), (spec,))
    forward = Graph(
        chunk.forward.inputs, (*chunk.forward.nodes, more),
        (*chunk.forward.outputs, replace(chunk.forward.outputs[0], name="r",
         kind=OutputKind.RESULT, ref=Ref("own"))),
    )  # fmt: skip
    chunks = {**CHUNKS, 0: replace(chunk, forward=forward)}
    names = {own.name for own in of_rank("0F0 0B0; 1F0 1B0; 2F0 2B0", chunks=chunks)}
    assert "0F0 j:mm" in names
    assert "0F0 own" not in names


def test_a_checkpoint_keeps_the_input_alone() -> None:
    chunks = {s: checkpointed(c, ()) for s, c in CHUNKS.items()}
    rest = "1F0 1F1 1B0 1B1; 2F0 2F1 2B0 2B1"
    less = of_rank(f"0F0 0F1 0R0 0B0 0R1 0B1; {rest}", chunks=chunks)
    assert most_alive(less) < most_alive(of_rank(f"0F0 0F1 0B0 0B1; {rest}"))

"""Computes that are measured in the order of the Program, without other ranks and with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from merakc.ir.graph import Input, InputKind, Output, OutputKind, Ref
from merakc.ir.program import ActionKind, Mesh, Transfer
from merakc.passes.programs.schedule import build_programs
from merakc.runtime.executor import Executor, Step
from merakc.runtime.trial import MICRO_BATCHES, trial_seconds
from merakc.schedules.registry import make_schedule
from tests.runtime.test_executor import CPU, MUL, SPEC, V, W, first_stage, last_stage, node

COMPUTES = {ActionKind.FORWARD, ActionKind.BACKWARD}


def of_two(rank: int, micro_batches: int) -> Executor:
    """One of two pipeline ranks, of which the other is not there."""
    schedule = make_schedule("1f1b", 2, micro_batches)
    program = build_programs(Mesh(pp=2), schedule, [Transfer("y", 0, 1, 24, True)])[rank]
    chunk, state = ((first_stage(), {"w": W.clone()}), (last_stage(), {"v": V.clone()}))[rank]
    return Executor(program, {rank: chunk}, state, CPU)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_other_rank_is_needed(rank: int) -> None:
    executor = of_two(rank, 4)
    kept = {name: value.clone() for name, value in executor.state.items()}
    (seconds,) = trial_seconds(executor, alone=True).values()
    assert set(seconds) == COMPUTES
    assert all(s > 0 for s in seconds.values())
    assert all(torch.equal(executor.state[name], value) for name, value in kept.items())


def test_gradients_are_added_up_over_a_few_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[torch.Tensor] = []
    computed: list[ActionKind] = []
    compute = Step.compute

    def watched(step: Step, action: object) -> None:
        compute(step, action)  # type: ignore[arg-type]
        computed.append(action.kind)  # type: ignore[attr-defined]
        sums.extend(value.clone() for value in step.of.stages[1].sums.values())

    monkeypatch.setattr(Step, "compute", watched)
    executor = of_two(1, 3 * MICRO_BATCHES)
    executor.state["v"].fill_(0.0)
    trial_seconds(executor, alone=True)
    assert len(computed) == 2 * MICRO_BATCHES
    assert len(sums) > MICRO_BATCHES
    assert not executor.stages[1].sums  # nothing is held beyond it


def test_buffers_that_a_forward_writes_are_as_before() -> None:
    chunk = first_stage()
    seen = Input("seen", InputKind.BUFFER, SPEC, "seen")
    forward = replace(
        chunk.forward,
        inputs=(*chunk.forward.inputs, seen),
        nodes=(*chunk.forward.nodes, node("more", MUL, Ref("seen"), Ref("w"))),
        outputs=(*chunk.forward.outputs, Output("seen", OutputKind.BUFFER, Ref("more"))),
    )
    executor = of_two(0, 2)
    state = {"w": W.clone(), "seen": V.clone()}
    made = Executor(executor.program, {0: replace(chunk, forward=forward)}, state, CPU)
    trial_seconds(made, alone=True)
    assert torch.equal(state["seen"], V)

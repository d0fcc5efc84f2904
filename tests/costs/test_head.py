"""The bytes of what couples samples, against those of a step that runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.ranks import run_ranks
from merakc.costs.head import gather_seconds, head_bytes, with_head
from merakc.costs.timeline import program_memory
from merakc.ir.program import Mesh
from merakc.lowering.predict import planned_costs, predict
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.live_bytes import LiveBytes
from tests.coupled_models import ROUTED, TOWERS, Coupled
from tests.coupled_steps import prepared


def peaks(case: Coupled, mesh: Mesh, sizes: tuple[int, ...]) -> tuple[int, int]:
    """The predicted and the measured peak of this rank's step, without its state."""
    ready = prepared(case, mesh, sizes, 4, {})
    head, executor = ready.executor.head, ready.executor
    assert head is not None
    found = head_bytes(head.head, head.chunk, head.layout)
    chunks = {s: stage.chunk for s, stage in executor.stages.items()}
    memory = program_memory(executor.program, chunks, 0, head=found)
    executor.run(ready.inputs, ready.known)
    measured = []
    for _ in range(5):  # gloo's thread may let go of a message after the wait for it
        with LiveBytes(()) as live:
            executor.run(ready.inputs, ready.known)
        measured.append(live.peak_bytes)
    return max(m.peak_bytes for m in memory), min(measured)


@pytest.mark.parametrize("case", [TOWERS, ROUTED], ids=["towers", "routed"])
@pytest.mark.parametrize(("mesh", "sizes"), [(Mesh(), (64,)), (Mesh(dp=2), (64, 32))])
def test_bytes_of_a_step(case: Coupled, mesh: Mesh, sizes: tuple[int, ...]) -> None:
    for predicted, measured in run_ranks(mesh.world_size, peaks, case, mesh, sizes):
        assert predicted == pytest.approx(measured, rel=0.01)


def seconds_and_bytes() -> dict[str, float]:
    """What a head was planned to cost over what the executor's graphs say, and in a step."""
    mesh, cluster = Mesh(dp=2), replace(NOMINAL_CPU, link_latency_s=1e-3)
    ready = prepared(TOWERS, mesh, (32, 32), 2, {})
    head, lowered = ready.executor.head, ready.lowered
    assert head is not None
    (planned,) = planned_costs(lowered, cluster)
    exact = with_head(planned, head.head, head.chunk, head.layout, mesh, cluster)
    step, _ = predict(lowered, cluster, (exact,))
    less, _ = predict(lowered, cluster, (replace(exact, head_s=0.0, head_peak_bytes=0),))
    return {
        "seconds": planned.head_s / exact.head_s,
        "bytes": planned.head_peak_bytes / exact.head_peak_bytes,
        "added_s": (step.step_s - less.step_s) / exact.head_s,
        "added_bytes": step.peak_bytes[0] - less.peak_bytes[0],
        "gather_s": gather_seconds(head.head, mesh, cluster),
    }


def test_seconds_and_bytes_of_a_step() -> None:
    for found in run_ranks(2, seconds_and_bytes):
        assert found["seconds"] == pytest.approx(1)
        assert found["bytes"] == 1
        assert found["added_s"] == pytest.approx(1)
        assert found["added_bytes"] > 0
        assert found["gather_s"] > 1e-3

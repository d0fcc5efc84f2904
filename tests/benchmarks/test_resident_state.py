"""The scale of a rank's state: against what is known, and what else is alive is not hidden."""

from __future__ import annotations

import pytest
import torch

from benchmarks.layouts import Task
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.resident_state import Held, reachable, resident_state
from merakc.ir.program import Mesh


def weigh(shards: tuple[int, int, int], precision: str | None = None) -> list[Held]:
    task = Task(
        MODELS["llama"], Mesh(dp=2), 4, 4, 1, False, "1f1b", state_shards=shards,
        precision=precision,
    )  # fmt: skip
    return run_ranks(2, resident_state, task, torch.float32)


def test_what_is_reached() -> None:
    inner = torch.ones(2)

    def generator() -> object:
        local = torch.ones(3)
        yield
        del local

    running = generator()
    next(running)  # type: ignore[call-overload]
    found = reachable({"a": [inner], "b": running})
    assert {t.numel() for t in found if isinstance(t, torch.Tensor)} == {2, 3}


@pytest.mark.parametrize("counts", [(1, 2, 2), (2, 2, 2)])
def test_bytes_follow_the_shards(counts: tuple[int, int, int]) -> None:
    case = MODELS["llama"].model()
    elements = sum(p.numel() for p in case.parameters())
    for held in weigh(counts):
        assert held.elements == {0: elements}
        found = held.parameters_bytes, held.gradients_bytes, held.optimizer_bytes
        wanted = [size * elements / n for size, n in zip((4, 4, 8), counts, strict=True)]
        assert found == pytest.approx(wanted, rel=0.005)
        assert held.gathered_bytes == (4 * elements if counts[0] == 2 else 0)
        others = held.other_between_steps_bytes, held.other_between_micro_batches_bytes
        assert max(others) < 0.05 * 4 * elements


def test_bytes_of_mixed_precision() -> None:
    for held in weigh((1, 1, 2), "bf16-mixed"):
        found = held.parameters_bytes, held.gradients_bytes, held.optimizer_bytes
        elements = held.elements[0]
        wanted = [2 * elements, 2 * elements, 6 * elements]
        assert found == pytest.approx(wanted, rel=0.005)

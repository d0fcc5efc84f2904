"""What couples samples runs once for all micro-batches and dp ranks, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.ranks import run_ranks
from merakc.ir.program import Mesh
from tests.coupled_models import ROUTED, TOWERS
from tests.coupled_steps import joined, reference, trained

CASES = {"towers": TOWERS, "routed": ROUTED}
STEPS = [
    ("towers", Mesh(), (8,), {}),
    ("towers", Mesh(pp=2), (8,), {}),
    ("towers", Mesh(dp=2), (8, 4), {}),
    ("towers", Mesh(dp=2, pp=2), (4, 8), {}),
    ("towers", Mesh(tp=2), (8,), {}),
    ("towers", Mesh(tp=2, pp=2), (8,), {"sequence_parallel": True}),
    ("routed", Mesh(pp=2), (8,), {}),
    ("routed", Mesh(dp=2, pp=2), (4, 12), {"recompute": "full"}),
    ("routed", Mesh(tp=2), (8,), {}),
    ("routed", Mesh(pp=2), (8,), {"schedule": "zb-h1"}),
    ("routed", Mesh(pp=2), (8,), {"schedule": "zb-v", "recompute": "full"}),
    ("towers", Mesh(pp=2), (8,), {"schedule": "interleaved-1f1b"}),
]


@pytest.mark.parametrize(("name", "mesh", "sizes", "options"), STEPS, ids=str)
def test_a_step_is_that_of_one_process(
    name: str, mesh: Mesh, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    case = CASES[name]
    found = run_ranks(mesh.world_size, trained, case, mesh, sizes, 2, options)
    loss, gradients = reference(case, sum(sizes))
    losses = [f["loss"] for f in found if f["loss"] is not None]
    assert len(losses) == 1
    torch.testing.assert_close(losses[0], loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(joined(found, mesh.tp), gradients, rtol=1e-10, atol=1e-10)
    heads = [sum(label.endswith("head") for label in f["labels"]) for f in found]
    assert sum(heads) == mesh.dp * mesh.tp
    for f in found:  # all forwards come first
        kinds = "".join(label[1] for label in f["labels"] if label[:1].isdigit())
        assert "F" not in kinds.lstrip("F")

"""The decisions about a step."""

from __future__ import annotations

import dataclasses

from merakc.ir.plan import GraphId, Plan, StageRun
from merakc.ir.program import Mesh

PLAN = Plan(
    model="Tiny",
    dp=1,
    tp=2,
    pp=2,
    batch_size=8,
    micro_batches=4,
    schedule="1f1b",
    recompute="none",
    graph=GraphId("ab12", (("embed", "01"), ("layers.0", "02"))),
    stages=(
        StageRun(0, "embedding", "add", "embed", "layers.0"),
        StageRun(1, "linear", "cross_entropy", "layers.1", "head"),
    ),
    parameters={"embed.weight": (0, 1), "head.bias": (1,)},
    splits={"embed.weight": "8* x 4"},
)


def test_the_mesh_is_that_of_the_degrees() -> None:
    assert PLAN.mesh == Mesh(dp=1, tp=2, pp=2)


def test_the_hash_covers_every_decision() -> None:
    others = [
        dataclasses.replace(PLAN, micro_batches=8),
        dataclasses.replace(PLAN, stages=PLAN.stages[::-1]),
        dataclasses.replace(PLAN, graph=GraphId("ab13", PLAN.graph.modules)),
        dataclasses.replace(PLAN, splits={"embed.weight": "8 x 4*"}),
    ]
    assert len({PLAN.hash, *(plan.hash for plan in others)}) == 5

"""Seconds by kind of node add up to what the simulator has the ranks compute."""

from __future__ import annotations

import pytest

from merakc.ir.program import Mesh
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import planned_costs, predict
from merakc.machines.cluster import Cluster
from merakc.report.analysis import tp_collectives
from merakc.report.attribution import Attribution, attribute
from tests.report.made import ALL_AXES, H100, MICRO_BATCHES, SLOW, lowered

FULL = "full"
CASES = {
    "nominal": lambda: (lowered(Mesh(tp=2, pp=2)), SLOW),
    "hardware": lambda: (lowered(Mesh(tp=2, pp=2), cluster=H100), H100),
    "recomputed": lambda: (lowered(Mesh(pp=4), recompute=FULL), SLOW),
    "halves of backwards": lambda: (lowered(Mesh(pp=4), "zb-h1", cluster=H100), H100),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Lowered, Cluster, Attribution]:
    found, cluster = CASES[request.param]()
    return found, cluster, attribute(found, cluster, planned_costs(found, cluster))


def test_seconds_add_up_to_what_ranks_compute(case: tuple[Lowered, Cluster, Attribution]) -> None:
    made, cluster, found = case
    _, simulation = predict(made, cluster, dp_rank=0)
    tied_s = sum(
        e.end_s - e.start_s for e in simulation.events if e.label.startswith("reduce")
    )  # without dp, a reduction adds up tied gradients
    computed_s = sum(simulation.busy_s) - tied_s
    assert sum(found.step_seconds.values()) == pytest.approx(computed_s, rel=1e-9)


def test_a_stage_adds_up_to_its_costs(case: tuple[Lowered, Cluster, Attribution]) -> None:
    _, _, found = case
    for stage, cost in zip(found.stages, found.costs, strict=True):
        spent = stage.spent.values()
        assert sum(s.forward_s for s in spent) == pytest.approx(cost.forward_s)
        assert sum(s.backward_s for s in spent) == pytest.approx(cost.backward_s)
        assert all(0 <= s.forward_wire_s <= s.forward_s for s in spent)


def test_products_of_all_layers_are_one_kind() -> None:
    made = lowered(Mesh(pp=2))
    found = attribute(made, SLOW, planned_costs(made, SLOW))
    kinds = [k for k in found.counts if k.module == "transformer.h.*.mlp.c_fc" and k.op == "addmm"]
    assert [found.counts[k] for k in kinds] == [4]
    assert kinds[0].source.rpartition(":")[0].endswith("pytorch_utils.py")


def test_layouts_are_those_of_results() -> None:
    made = lowered(ALL_AXES)
    found = attribute(made, SLOW, planned_costs(made, SLOW))
    up = next(k for k in found.counts if k.module.endswith("mlp.c_fc") and k.op == "addmm")
    assert "*" in up.layout
    down = next(k for k in found.counts if k.module.endswith("mlp.c_proj") and k.op == "mm")
    assert down.layout.endswith(" partial sums")
    reduced = [k for k in found.counts if k.op == "all_reduce"]
    assert reduced
    assert all("*" not in k.layout and k.source for k in reduced)


def test_collectives_count_forward_and_backward() -> None:
    made = lowered(Mesh(tp=2))
    (stage,) = attribute(made, SLOW, planned_costs(made, SLOW)).stages
    total = sum(n for kernel, n in stage.collectives.items() if "all_reduce" in kernel.op)
    counts = tp_collectives(made)
    least = counts["forward all-reduce"] + counts["backward all-reduce"]
    assert total >= least > 2 * MICRO_BATCHES

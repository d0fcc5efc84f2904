"""What two plans decide differently."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from merakc.ir.plan import Plan
from merakc.ir.plan_file import Prediction
from merakc.ir.state import StateShards
from merakc.machines.cluster import NOMINAL_CPU
from merakc.report.diff import Change, changes_table, plan_changes, prediction_changes
from tests.report.made import report
from tests.report.test_text import tiny_file, tiny_plan


@pytest.fixture
def plan() -> Plan:
    return tiny_plan()


def test_equal_plans_have_no_changes(plan: Plan) -> None:
    assert plan_changes(plan, replace(plan, graph=replace(plan.graph, modules=()))) == []


def test_every_decision_is_told(plan: Plan) -> None:
    moved = {n: (1,) if n == "layers.1.norm.weight" else s for n, s in plan.parameters.items()}
    whole = {n: layout for n, layout in plan.splits.items() if "qkv" not in n}
    other = replace(
        plan,
        dp=2,
        state_shards=(StateShards(1, 1, 2),) * 2,
        parameters=moved,
        splits=whole,
        stages=(plan.stages[0], replace(plan.stages[1], first_module="x"), plan.stages[2]),
    )
    assert plan_changes(plan, other) == [
        Change("dp", "1", "2"),
        Change("total_batch_size", "16", "32"),
        Change("state_shards", "-", "1, 1, 2; 1, 1, 2"),
        Change("parameters: layers.*.norm.weight", "0", "1"),
        Change("splits: layers.*.attn.qkv.weight (4)", "3·4*·2 x 8", "-"),
        Change(
            "stage 1",
            "(model) .. (model); layers.2.attn .. lm_head",
            "x .. (model); layers.2.attn .. lm_head",
        ),
    ]


def test_machines_are_told_by_name_and_by_the_figures_that_differ(plan: Plan) -> None:
    plain = replace(plan, machines=None)
    on = replace(plan, machines=NOMINAL_CPU)
    faster = replace(plan, machines=replace(NOMINAL_CPU, name="faster", link_latency_s=1.0))
    assert plan_changes(plain, on) == [Change("machines", "-", NOMINAL_CPU.name)]
    assert plan_changes(plain, on, brief=True) == [Change("machines", "-", NOMINAL_CPU.name)]
    parts = replace(on, sub_batches=(2, 2, 2))
    told = plan_changes(plain, parts, brief=True)
    assert told == [Change("sub_batches", "-", "2 (3 times)")]
    assert sorted(plan_changes(on, faster), key=lambda c: c.what) == [
        Change("machines: link_latency_s", str(NOMINAL_CPU.link_latency_s), "1.0"),
        Change("machines: name", NOMINAL_CPU.name, "faster"),
    ]


def test_the_batch_is_that_of_all_ranks(plan: Plan) -> None:
    other = replace(plan, dp=2, batch_size=plan.batch_size // 2)
    assert plan_changes(plan, other) == [Change("dp", "1", "2")]


def test_in_brief_parameters_are_counted_and_orders_begun(plan: Plan) -> None:
    moved = {n: (1,) if n.endswith("norm.weight") else s for n, s in plan.parameters.items()}
    order = ("0F0 0F1 0B0 0B1 0U", "1F0 1B0 1F1 1B1 1U", "2F0 2B0 2F1 2B1 2U")
    other = replace(plan, parameters=moved, order=order)
    count = sum(moved[n] != s for n, s in plan.parameters.items())
    begun = "0F0 0F1 0B0 0B1 .. (5 actions); 1F0 1B0 1F1 1B1 .. (5 actions); .. (3 ranks)"
    assert plan_changes(plan, other, brief=True) == [
        Change("order", "-", begun),
        Change("parameters", "", f"{count} on other stages"),
    ]


def test_in_brief_lists_of_parameters_are_patterns(plan: Plan) -> None:
    names = tuple(n for n in plan.parameters if n.endswith("norm.weight"))
    assert len(names) > 2
    other = replace(plan, fused_products=names, state_shards=(StateShards(1, 1, 2),) * 3)
    patterns = {c.what: (c.first, c.second) for c in plan_changes(plan, other, brief=True)}
    assert patterns.pop("state_shards") == ("-", "1, 1, 2 (3 times)")
    assert all(what.startswith("fused_products: ") for what in patterns)
    assert set(patterns.values()) == {("-", "named")}
    assert len(patterns) < len(names)
    (whole,) = (c for c in plan_changes(plan, other) if c.what == "fused_products")
    assert whole.second == "; ".join(names)


def test_the_machines_that_plans_were_made_for_are_told_where_they_differ() -> None:
    plan = tiny_file()
    on = {name: replace(plan, report=replace(report(), machines=name)) for name in ("h100", "a")}
    assert prediction_changes(on["h100"], on["a"])[0] == Change("made for", "h100", "a")
    same = prediction_changes(on["a"], on["a"])
    assert [change.what for change in same] == ["step", "idle", "peak of a rank"]


def test_predictions_and_the_table() -> None:
    first, slower = tiny_file(), tiny_file(Prediction(0.0246, 0.5, (3 << 29, 0)), dp=2)
    changes = prediction_changes(first, slower)
    assert changes[0] == Change("step", "12.30 ms", "24.60 ms (+100.0%)")
    assert changes[2] == Change("peak of a rank", "3.00 GiB", "1.50 GiB (-50.0%)")
    assert prediction_changes(first, tiny_file(None)) == []
    page = io.StringIO()
    Console(file=page, width=80).print(changes_table(changes, "a.json", "[b] :x:.json"))
    assert "a.json" in page.getvalue()
    assert "24.60 ms (+100.0%)" in page.getvalue()

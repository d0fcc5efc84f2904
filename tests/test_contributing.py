"""What CONTRIBUTING.md tells newcomers is short, and works as it is written there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from merakc.cli.app import app
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.machines import cluster_files
from merakc.passes import pipeline
from merakc.passes.pipeline import AUTODIFF, differentiate
from merakc.passes.sharding import rules
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.shard import sharding_of
from merakc.schedules import one_f_one_b, registry
from tests.machines import test_cluster_files
from tests.passes import rule_cases
from tests.passes.sharding.test_rules import build, check, splittable
from tests.schedules import test_registry

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
CHANGES = ("A new sharding rule", "A new pass", "A new schedule", "A new cluster preset")
OP = "aten._cdist_forward.default"


def blocks(section: str) -> list[str]:
    return re.findall(r"```\w+\n(.*?)```", SECTIONS[section], re.DOTALL)


def entry(block: str, names: dict[str, object]) -> dict[str, object]:
    """The entry of a table that a block is."""
    found: dict[str, object] = eval(f"{{\n{block}}}", names)
    return found


@pytest.mark.parametrize("section", CHANGES)
def test_a_change_is_told_in_few_lines(section: str) -> None:
    lines = [x for x in SECTIONS[section].splitlines() if x and not x.startswith("```")]
    assert len(lines) <= 10


def test_the_tour_fits_a_page_and_names_every_room() -> None:
    tour = SECTIONS["A tour of the code"]
    assert len(tour.splitlines()) <= 45
    rooms = [p.parent.name for p in (ROOT / "merakc").glob("*/__init__.py")]
    assert not [name for name in rooms if not re.search(rf"`(merakc/)?{name}/?`", tour)]


def test_a_sharding_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    row, case = blocks("A new sharding rule")
    others = {op: own for op, own in rules.ROWS.items() if op != OP}
    monkeypatch.setattr(rules, "ROWS", others)
    assert rules.row_of(OP) is None
    monkeypatch.setattr(rules, "ROWS", {**others, **entry(row, {})})
    monkeypatch.setattr(rule_cases, "CALLS", entry(case, vars(rule_cases)))
    graph, values = build(OP, rule_cases.picked(OP, lambda low, high: high))
    dims = propagate(graph)
    splits = splittable(dims, 2)
    assert len(splits) == 3  # samples, and the rows of either
    for factors in splits:
        check(graph, values, sharding_of(dims, factors, 2))


def test_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    function, listed = blocks("A new pass")
    names = {**vars(pipeline), "Graph": Graph, "Ref": Ref}
    exec(function, names)
    (made,) = eval(f"[{listed}]", names)
    spec = TensorSpec((2,), torch.float32)
    x = Input("x", InputKind.PARAMETER, spec, "x", True)
    ops = (("a", "neg", "x"), ("b", "neg", "a"), ("y", "sin", "b"))
    nodes = tuple(Node(n, f"aten.{op}.default", (Ref(r),), (), (spec,)) for n, op, r in ops)
    graph = Graph((x,), nodes, (Output("loss", OutputKind.LOSS, Ref("y")),))
    monkeypatch.setattr(pipeline, "AUTODIFF", (*AUTODIFF[:-1], made, AUTODIFF[-1]))
    chunk = differentiate(graph)
    assert [n.op for n in chunk.forward.nodes] == ["aten.sin.default"]
    assert chunk.backward is not None
    assert "neg" not in str(chunk.backward)


def test_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    function, listed = blocks("A new schedule")
    names = dict(vars(one_f_one_b))
    exec(function, names)
    known = entry(listed, {**vars(registry), "eager": names["eager"]})
    monkeypatch.setattr(registry, "KNOWN", {**registry.KNOWN, **known})
    monkeypatch.setattr(test_registry, "KNOWN", registry.KNOWN)
    (name,) = known
    assert name not in registry.NAMES
    test_registry.test_every_action_once_for_all_small_sizes(name)
    first = registry.make_schedule(name, 2, 4).orders[0]
    assert [str(action) for action in first[:3]] == ["0F0", "0F1", "0F2"]


def test_a_cluster_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = blocks("A new cluster preset")
    (tmp_path / "l40s.toml").write_text(text)
    for module in (cluster_files, test_cluster_files):
        monkeypatch.setattr(module, "PRESETS", tmp_path)
    assert cluster_files.preset_names() == ("l40s",)
    test_cluster_files.test_a_preset_states_its_sources("l40s")
    plan = tmp_path / "plan.json"
    command = ["plan", "tests.small_source:small", "--cluster", "l40s:2", "--batch", "32"]
    done = CliRunner().invoke(app, [*command, "-o", str(plan)])
    assert done.exit_code == 0, done.output
    assert "= 16 ranks" in done.output

"""`merakc graph`: what it writes holds the graph, and what a plan decides of it."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
from typer.testing import CliRunner

from merakc.cli.app import app
from merakc.ir.plan_file import load_plan
from merakc.ir.text import graph_text, parse_graph

SOURCE = "tests.small_source:small"


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.stdout if code == 0 else found.output


def test_a_graph_without_a_plan_is_one_stage(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    printed = run("graph", SOURCE, "-o", str(file), "--samples", "2")
    assert "GFLOP" in printed
    found = nx.node_link_graph(json.loads(file.read_text()), edges="edges")
    calls = [facts for _, facts in found.nodes(data=True) if facts["kind"] == "call"]
    assert {facts["stage"] for facts in calls} == {"0"}
    assert any(facts["flops"] > 0 for facts in calls)
    assert all(".py:" in facts["source"] for facts in calls)


def test_a_plan_says_stages_and_splits(tmp_path: Path) -> None:
    plan, file = str(tmp_path / "plan.json"), tmp_path / "graph.graphml"
    run("plan", SOURCE, "--ranks", "4", "--batch", "8", "--cluster", "cpu", "--tp", "2", "--pp",
        "2", "--micro-batches", "4", "--schedule", "1f1b", "-o", plan)  # fmt: skip
    printed = run("graph", SOURCE, "-o", str(file), "--plan", plan)
    assert "from other stages" in printed
    found = nx.read_graphml(file)
    stages = {facts["stage"] for _, facts in found.nodes(data=True) if facts["kind"] == "call"}
    assert stages - {"all"} == {"0", "1"}
    assert len(load_plan(plan).decisions.rank_of) == 2
    splits = {facts["split"] for _, _, facts in found.edges(data=True)}
    assert len(splits) > 1
    crossing = [
        (one, other)
        for one, other in found.edges()
        if (found.nodes[one].get("stage"), found.nodes[other].get("stage")) == ("0", "1")
    ]
    assert crossing


def test_the_text_form_parses_back(tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    run("graph", SOURCE, "-o", str(file))
    text = file.read_text()
    assert graph_text(parse_graph(text)) + "\n" == text
    assert "aten.linear.default(%x, %first.weight" in text


def test_wrong_use(tmp_path: Path) -> None:
    assert "must end with .json" in run("graph", SOURCE, "-o", "graph.png", code=2)
    both = run("graph", SOURCE, "-o", "x.json", "--plan", "p.json", "--samples", "2", code=2)
    assert "the plan says how many" in both

"""The list of passes is what runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.models import MODELS
from merakc.ir.graph import Graph
from merakc.ir.program import Mesh
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.overlap import choose_overlap
from merakc.machines.cluster import NOMINAL_GPU
from merakc.passes import pipeline
from merakc.passes.pipeline import LOCAL, PIPELINE, STAGE, differentiate
from merakc.passes.running import Kind, Pass, graphs_of, watched
from tests.recorded import recorded

ROOT = Path(__file__).resolve().parents[2]
NAMES = [p.name for p in PIPELINE]
PLACE = {name: k for k, name in enumerate(NAMES)}
# Rough estimates of graphs that never run.
ESTIMATES = {
    ("merakc/planner/piece_table.py", name)
    for name in ("in_parts", "spmd_partition", "with_scaled_products")
}


@cache
def lowered(name: str = "gpt2", **options: str) -> Lowered:
    """On ranks of every axis, with micro-batches in parts."""
    case = MODELS[name]
    mesh = Mesh(2, 2, 2)

    def record(parts: int) -> object:
        return recorded(case.model(), case.batch(8), parts, dp=2, divided=True)

    made = make_plan(
        record(2), Strategy().on(mesh, micro_batches=2, batch_size=8, **options), NOMINAL_GPU
    )  # type: ignore[arg-type]
    plan = made.plan
    return choose_overlap(replace(made, plan=plan), record, NOMINAL_GPU, 2)  # type: ignore[arg-type]


def ran(name: str = "gpt2", **options: str) -> list[tuple[Pass, object, object]]:
    """What runs for a model, from its recording to the Programs of its ranks."""
    told: list[tuple[Pass, object, object]] = []
    with watched(lambda each, given, made, seconds: told.append((each, given, made))):
        found = lowered.__wrapped__(name, **options)
        for rank in range(8):
            found.rank_graphs(rank)
            found.rank_graphs(rank, train=False)
        replace(found, compiled=True, onednn=True).rank_graphs(0)
        found.with_collectives(found.programs())
    return told


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"schedule": "zb-h1", "recompute": "selective"}),
        ("llama", {"schedule": "1f1b", "recompute": "full"}),
    ],
)
def test_what_runs_is_the_list_in_its_order(name: str, options: dict[str, str]) -> None:
    told = ran(name, **options)
    assert {each.name for each, _, _ in told} == set(NAMES)
    assert all(each is PIPELINE[PLACE[each.name]] for each, _, _ in told)
    made_by: dict[int, int] = {}  # the last pass that handed on each value
    for each, given, made in told:
        place = PLACE[each.name]
        assert made_by.get(id(given), -1) < place, f"{each.name} after {NAMES[made_by[id(given)]]}"
        made_by[id(made)] = place


def test_each_pass_takes_what_one_before_it_gives() -> None:
    assert len(PLACE) == len(PIPELINE), "a name appears twice"
    given = {Kind.RECORDED}
    for each in PIPELINE:
        assert each.takes in given, each.name
        given.add(each.gives)
        assert each.does[0].isupper(), each.name
        assert each.does.endswith("."), each.name
    assert given == set(Kind)


def _imported(path: Path) -> Iterator[str]:
    """The names that a module takes from the rooms of passes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("merakc.passes."):
            yield from (a.name for a in node.names)


def test_nothing_else_runs_a_pass() -> None:
    own = {n for n in _imported(ROOT / "merakc/passes/pipeline.py") if n[0].islower()}
    own.remove("run_passes")
    assert {"rolled", "spmd_partition", "simplify", "by_onednn"} <= own
    rooms = (f for f in (ROOT / "merakc").rglob("*.py") if "passes" not in f.parts)
    users = {(str(f.relative_to(ROOT)), n) for f in rooms for n in own.intersection(_imported(f))}
    assert users == ESTIMATES


def test_a_pass_is_added_by_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(graph: Graph, *_: object) -> Graph:
        return replace(graph, nodes=(*graph.nodes, graph.nodes[-1]))

    wrong = Pass("double", "Breaks the graph.", Kind.LOCAL, Kind.LOCAL, doubled)
    monkeypatch.setattr(pipeline, "STAGE", (*LOCAL, wrong, *STAGE[len(LOCAL) :]))
    with pytest.raises(AssertionError, match=r"the pass 'double' broke its graph: node .* twice"):
        lowered().stage_graphs(0, 0)


def test_differentiating_alone_is_a_part_of_the_list() -> None:
    local = lowered().stages.local[0]
    told: list[str] = []
    with watched(lambda each, given, made, seconds: told.append(each.name)):
        chunk = differentiate(local)
    assert told == ["differentiate", "simplify", "fewer-passes", "partition"]
    assert graphs_of(chunk) == (chunk.forward, chunk.backward)

"""How passes run: in order, checked, and watched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import Action, ActionKind, Program, StageGraphs
from merakc.passes import running
from merakc.passes.pipeline import PARTS, differentiate
from merakc.passes.running import Kind, Pass, graphs_of, run_passes, verify, watched

SPEC = TensorSpec((2,), torch.float32)
X = Input("x", InputKind.PARAMETER, SPEC, "x", True)
GRAPH = Graph(
    (X,),
    tuple(Node(n, "aten.sin.default", (Ref("x"),), (), (SPEC,)) for n in ("a", "b")),
    (Output("loss", OutputKind.LOSS, Ref("b")),),
)


def prune(graph: Graph) -> Graph:
    return graph.pruned()


def forget(graph: Graph) -> Graph:
    """A pass that takes out what an output reads."""
    return replace(graph, nodes=graph.nodes[:1])


def a_pass(function: object) -> Pass:
    name = getattr(function, "__name__", "")
    return Pass(name, "For a test.", Kind.PART, Kind.PART, function)  # type: ignore[arg-type]


KEEP = Pass("keep", "Does nothing.", Kind.PART, Kind.PART, lambda graph: graph)


def test_passes_run_in_order_with_the_same_options() -> None:
    add = Pass("add", "", Kind.PART, Kind.PART, lambda names, more: (*names, more))
    twice = Pass("twice", "", Kind.PART, Kind.PART, lambda names, more: names * 2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(running, "CHECKED", False)
        assert run_passes((add, twice, add), (), "x") == ("x", "x", "x")


def test_the_pass_that_broke_a_graph_is_named() -> None:
    assert running.CHECKED, "the tests' conftest asks for it"
    with pytest.raises(AssertionError, match=r"the pass 'forget' broke its graph: output loss"):
        run_passes((KEEP, a_pass(forget), a_pass(prune)), GRAPH)


def test_nothing_is_verified_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "CHECKED", False)
    monkeypatch.setattr(running, "verify", None)  # calling it would fail
    assert run_passes((a_pass(forget), KEEP), GRAPH) == forget(GRAPH)


def test_a_graph_that_is_handed_on_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "verify", None)
    assert run_passes((KEEP, KEEP), GRAPH) is GRAPH


def test_watchers_are_told_of_every_pass_while_they_watch() -> None:
    told: list[tuple[str, object, object]] = []
    with watched(lambda each, given, made, seconds: told.append((each.name, given, made))):
        pruned = run_passes((KEEP, a_pass(prune)), GRAPH)
    run_passes((KEEP,), GRAPH)
    assert told == [("keep", GRAPH, GRAPH), ("prune", GRAPH, pruned)]


def test_everything_in_a_chunk_is_verified() -> None:
    chunk = differentiate(GRAPH)
    assert len(graphs_of(chunk)) == 2
    verify(chunk)
    lost = replace(chunk.forward, outputs=chunk.forward.outputs[:1])
    with pytest.raises(AssertionError, match="which no piece saves"):
        verify(StageGraphs(lost, replace(GRAPH, inputs=(replace(X, kind=InputKind.SAVED),))))
    with pytest.raises(AssertionError, match="not defined"):
        verify(replace(chunk, checkpoint=forget(GRAPH)))


@pytest.mark.parametrize(
    ("actions", "problem"),
    [
        ((ActionKind.FORWARD, ActionKind.FORWARD), "0F0 twice"),
        ((ActionKind.BACKWARD, ActionKind.FORWARD), "0B0 before its forward"),
    ],
)
def test_programs_are_verified(actions: tuple[ActionKind, ...], problem: str) -> None:
    verify((Program(0, (Action(ActionKind.FORWARD, 0), Action(ActionKind.BACKWARD, 0))),))
    with pytest.raises(AssertionError, match=problem):
        verify((Program(0, tuple(Action(kind, 0) for kind in actions)),))


def test_errors_of_users_pass_through() -> None:
    with pytest.raises(AttributeError):
        run_passes(PARTS, None, 1, ())

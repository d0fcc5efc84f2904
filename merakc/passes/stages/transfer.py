"""The stages of a plan for another recording of the same model."""

from __future__ import annotations

from collections.abc import Mapping

from merakc.errors import PlanError
from merakc.ir.graph import Graph, InputKind, Node
from merakc.passes.stages.stage import shared_nodes


def transfer_stages(
    graph: Graph, planned: Graph, of: Mapping[str, int], holders: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Stages for another recording of the same model (eval mode, other shapes).

    A node goes where the node of the same module, op and turn went, but never before what it
    reads, nor behind a stage that holds the parameters of what reads it; where it reads parameters
    itself, to a stage that holds them (`holders`).
    """
    known: dict[tuple[str, str, int], int] = {}
    for key, node in _turns(planned):
        if node.name in of:
            known[key] = of[node.name]
    shared = shared_nodes(graph, trained=False)  # which stages hold what is settled
    targets = {i.name: i.target for i in graph.inputs if i.kind is InputKind.PARAMETER}
    # A second call of a module has turns that other nodes of its kind had.
    latest: dict[str, int] = {}
    for node in reversed(graph.nodes):
        ends = [max(holders[targets[r.node]]) for r in node.refs if r.node in targets]
        own = min([latest.get(node.name, max(of.values(), default=0)), *ends])
        latest |= {r.node: min(own, latest.get(r.node, own)) for r in node.refs}
        latest[node.name] = own
    found: dict[str, int] = {}
    for key, node in _turns(graph):
        if node.name in shared:
            continue
        earliest = max((found[r.node] for r in node.refs if r.node in found), default=0)
        stage = max(min(known.get(key, 0), latest[node.name]), earliest)
        held = [set(holders[targets[r.node]]) for r in node.refs if r.node in targets]
        allowed = sorted(set.intersection(*held)) if held else [stage]
        if stage not in allowed:
            stage = next((s for s in allowed if s >= earliest), -1)
        if stage < 0:
            raise PlanError(
                f"{node.source}: with this batch or mode, module '{node.module}' reads parameters "
                f"of stages {allowed} after values of stage {earliest}; plan with this batch"
            )
        found[node.name] = stage
    return found


def stages_like(graph: Graph, planned: Graph, of: Mapping[str, int]) -> dict[str, int]:
    """Stages for a recording of other sizes that is to exchange the same values.

    A node goes where the node of the same module, op and turn went, or to every stage that reads
    it where that one did; one that `planned` lacks follows what it reads.
    """
    known = {key: of.get(node.name, -1) for key, node in _turns(planned)}
    found: dict[str, int] = {}
    for key, node in _turns(graph):
        earliest = max((found[r.node] for r in node.refs if r.node in found), default=-1)
        stage = known.get(key, earliest)
        if stage >= 0:
            found[node.name] = max(stage, earliest)
    return found


def _turns(graph: Graph) -> list[tuple[tuple[str, str, int], Node]]:
    counts: dict[tuple[str, str], int] = {}
    found = []
    for node in graph.nodes:
        turn = counts.get((node.module, node.op), 0)
        counts[node.module, node.op] = turn + 1
        found.append(((node.module, node.op, turn), node))
    return found

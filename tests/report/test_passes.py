"""What is told of passes: sizes of what they take and give, added up over their runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from merakc.costs.device import place_on
from merakc.costs.nodes import graph_seconds
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import Action, ActionKind, Program, StageGraphs
from merakc.machines.cluster import NOMINAL_GPU
from merakc.passes.pipeline import PIPELINE, differentiate
from merakc.report.passes import Size, effects_table, pass_effect, value_size

SPEC = TensorSpec((256,), torch.float32)
PLACE = place_on(NOMINAL_GPU, 1)
GRAPH = Graph(
    (Input("x", InputKind.PARAMETER, SPEC, "x", True),),
    (
        Node("a", "aten.sin.default", (Ref("x"),), (), (SPEC,)),
        Node("b", "aten.view.default", (Ref("a"), (256,)), (), (SPEC,)),
    ),
    (Output("loss", OutputKind.LOSS, Ref("b")),),
)
BY_NAME = {p.name: p for p in PIPELINE}


def test_a_graphs_size_leaves_out_what_views_do_not_write() -> None:
    found = value_size(GRAPH, PLACE)
    assert found == Size(2, 1024, graph_seconds(GRAPH, PLACE))


def test_of_a_chunk_the_pieces_that_a_micro_batch_runs_count() -> None:
    chunk = differentiate(GRAPH)
    plain = value_size(chunk, PLACE)
    assert plain.nodes == sum(len(g.nodes) for g in (chunk.forward, chunk.backward) if g)
    split = replace(chunk, input_grad=GRAPH, weight_grad=GRAPH)
    assert value_size(split, PLACE).nodes == len(chunk.forward.nodes) + 4
    again = StageGraphs(chunk.forward, None, checkpoint=GRAPH, recompute=GRAPH)
    assert value_size(again, PLACE).nodes == 4


def test_of_programs_actions_and_messages_count() -> None:
    send = Action(ActionKind.SEND, 0, value="a", peer=1, size_bytes=100)
    programs = (Program(0, (Action(ActionKind.FORWARD, 0), send)), Program(1, ()))
    assert value_size(programs, PLACE) == Size(2, 100, 0.0)


def test_runs_of_a_pass_are_one_row_in_the_pipelines_order() -> None:
    smaller = replace(GRAPH, nodes=GRAPH.nodes[:1])
    runs = [("simplify", GRAPH, smaller), ("freeze", GRAPH, GRAPH), ("simplify", GRAPH, GRAPH)]
    effects = [pass_effect(BY_NAME[n], given, made, PLACE) for n, given, made in runs]
    rows = effects_table(effects).rows
    assert [row[:4] for row in rows] == [("freeze", "1", "2", "="), ("simplify", "2", "4", "3")]
    assert rows[1][4:6] == ("2.00 KiB", "=")


@pytest.mark.parametrize("name", ["programs", "dp-collectives"])
def test_nothing_is_said_of_the_seconds_of_programs(name: str) -> None:
    effect = pass_effect(BY_NAME[name], (), (Program(0, ()),), PLACE)
    assert effects_table([effect]).rows[0][-1] == "="
    assert effects_table([effect]).rows[0][-2] == "-"

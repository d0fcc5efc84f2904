"""Checkpoints: what is made again equals what was kept, and the cut is the cheapest."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch

from benchmarks.models import MODELS
from merakc.analysis.aliases import is_view
from merakc.costs.device import place_on
from merakc.costs.nodes import node_seconds
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import Mesh, StageGraphs
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.machines.cluster import NOMINAL_CPU, NOMINAL_GPU
from merakc.passes.autodiff import recompute
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.autodiff.recompute import (
    KEPT_BY_SELECTIVE,
    checkpointed,
    kept_bytes,
    selective,
    within_bytes,
)
from merakc.passes.pipeline import differentiate

MODELS_WITH_BUFFERS = ("resnet",)
GPU = place_on(NOMINAL_GPU, 1)
STAGES = 2


@cache
def lowered(name: str) -> Lowered:
    case = MODELS[name]
    recording = record(case.model(dropout=0.1), (), case.batch(2))
    return make_plan(recording, Strategy().on(Mesh(pp=STAGES), micro_batches=1), NOMINAL_CPU)


@cache
def chunk_of(name: str, stage: int) -> StageGraphs:
    return lowered(name).stage_graphs(stage, 0)


def values(graph: Graph) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    found = {}
    for item in graph.inputs:
        if item.name in graph.constants:
            continue
        shape, dtype = item.spec.shape, item.spec.dtype
        if dtype.is_floating_point:
            found[item.name] = torch.rand(shape, generator=draw, dtype=dtype) + 0.5
        else:
            found[item.name] = torch.randint(0, 2, shape, generator=draw).to(dtype)
    return found


def run(graph: Graph, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    own = {i.name: given[i.key] for i in graph.inputs if i.name not in graph.constants}
    names = [o.name for o in graph.outputs]
    return dict(zip(names, interpret(graph, own), strict=True))


@pytest.mark.parametrize("how", ["full", "selective", "half"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "whisper"])
def test_what_is_made_again_is_bit_equal(name: str, how: str) -> None:
    for stage in range(STAGES):
        chunk = chunk_of(name, stage)
        half_bytes = kept_bytes(chunk, within_bytes(chunk, 1 << 60, GPU)) // 2
        kept = frozenset[Ref]()
        if how == "selective":
            kept = selective(chunk)
        elif how == "half":
            kept = within_bytes(chunk, half_bytes, GPU)
        made = checkpointed(chunk, kept)
        assert made.checkpoint is not None
        assert made.recompute is not None
        made.checkpoint.verify()
        made.recompute.verify()
        given = values(chunk.forward)
        wanted = run(chunk.forward, given)
        found = run(made.checkpoint, given)
        assert found.keys() & wanted.keys() >= {
            o.name for o in chunk.forward.outputs if o.kind is not OutputKind.SAVED
        }
        again = run(made.recompute, given | found)
        assert {o.kind for o in made.recompute.outputs} <= {OutputKind.SAVED}
        assert not again.keys() & found.keys()
        found |= again
        for key, value in wanted.items():
            assert torch.equal(found[key].nan_to_num(), value.nan_to_num()), key


def test_full_keeps_nothing() -> None:
    made = checkpointed(chunk_of("gpt2", 0), ())
    assert made.checkpoint is not None
    assert not [o for o in made.checkpoint.outputs if o.kind is OutputKind.SAVED]


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama"])
def test_selective_runs_no_product_with_weights_again(name: str) -> None:
    for stage in range(STAGES):
        chunk = chunk_of(name, stage)
        made = checkpointed(chunk, selective(chunk))
        assert made.recompute is not None
        assert made.recompute.nodes
        assert not [n for n in made.recompute.nodes if n.op in KEPT_BY_SELECTIVE]
        everything = kept_bytes(chunk, within_bytes(chunk, 1 << 60, GPU))
        assert kept_bytes(chunk, selective(chunk)) < 0.55 * everything


def test_more_bytes_never_take_longer() -> None:
    chunk = chunk_of("gpt2", 1)
    everything = kept_bytes(chunk, within_bytes(chunk, 1 << 60, GPU))
    times = []
    for tenth in range(11):
        budget_bytes = everything * tenth // 10
        kept = within_bytes(chunk, budget_bytes, GPU)
        assert kept_bytes(chunk, kept) <= budget_bytes
        graph = checkpointed(chunk, kept).recompute
        computing = [n for n in graph.nodes if not is_view(n)] if graph else []
        specs = graph.specs() if graph else {}
        times.append(sum(node_seconds(n, specs, GPU) for n in computing))
    assert times == sorted(times, reverse=True)
    assert times[0] > 4 * times[8] > 0


def ladder() -> StageGraphs:
    """Products and cheap calls in turn, of different sizes."""
    x = Input("x", InputKind.BATCH, TensorSpec((4, 8), torch.float64), "x")
    shapes = {"a": (8, 16), "b": (16, 4), "c": (4, 12)}
    weights = [Input(n, InputKind.PARAMETER, TensorSpec(s, torch.float64), n, True)
               for n, s in shapes.items()]  # fmt: skip
    nodes, at = [], Ref("x")
    for name, (_, width) in shapes.items():
        spec = TensorSpec((4, width), torch.float64)
        nodes.append(Node(f"m{name}", "aten.mm.default", (at, Ref(name)), (), (spec,)))
        nodes.append(Node(f"t{name}", "aten.sin.default", (Ref(f"m{name}"),), (), (spec,)))
        at = Ref(f"t{name}")
    scalar = TensorSpec((), torch.float64)
    nodes.append(Node("loss", "aten.sum.default", (at,), (), (scalar,)))
    return differentiate(
        Graph((x, *weights), tuple(nodes), (Output("loss", OutputKind.LOSS, Ref("loss")),))
    )


@pytest.mark.parametrize("share", [0.01, 0.2, 0.4, 0.6, 0.8, 0.99])
def test_the_cut_is_the_cheapest_of_all_checkpoints(share: float) -> None:
    chunk = ladder()
    nodes = chunk.forward.nodes
    costs = {n.name: 5.0 if "mm" in n.op else 0.0 if "aten.t." in n.op else 1.0 for n in nodes}
    cut = recompute.Cut(chunk, costs)
    specs = chunk.forward.specs()
    candidates = [Ref(n.name) for n in nodes if n.name != "loss"]

    def price(kept: frozenset[Ref]) -> float:
        again = checkpointed(chunk, kept).recompute
        assert again is not None
        seconds = sum(costs[n.name] for n in again.nodes) / cut.total_s
        size = sum(specs[r].size_bytes for r in kept) / cut.total_bytes
        return (1 - share) * seconds + share * size

    subsets = [frozenset(c) for k in range(len(candidates) + 1)
               for c in combinations(candidates, k)]  # fmt: skip
    assert price(cut.kept(share)) == pytest.approx(min(map(price, subsets)), abs=1e-6)


def test_infinite_costs_are_never_paid() -> None:
    chunk = ladder()
    costs = {n.name: np.inf if "mm" in n.op else 1.0 for n in chunk.forward.nodes}
    kept = recompute.Cut(chunk, costs).kept(1.0)
    again = checkpointed(chunk, kept).recompute
    assert again is not None
    assert not [n for n in again.nodes if "mm" in n.op]


def test_a_chunk_without_gradients_recomputes_nothing() -> None:
    chunk = ladder()
    frozen = checkpointed(
        StageGraphs(checkpointed(chunk, ()).checkpoint or chunk.forward, None), ()
    )
    assert frozen.recompute is not None
    assert not frozen.recompute.nodes

"""Values that move: the same bits, with copies as late as they may be, in less memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from merakc.costs.nodes import graph_seconds
from merakc.costs.work.memory import order_bytes
from merakc.ir.graph import Graph
from merakc.ir.program import StageGraphs
from merakc.kernels.host import bind_copies, unbind_copies
from merakc.kernels.ops import BACK, GONE, OUT, WAIT
from merakc.passes.offload.choose import chosen, movable
from merakc.passes.offload.moves import moved
from merakc.runtime.codegen import compile_graph
from tests.passes.offload.lines import SIDE, SPLIT, WHOLE, at, chain

CPU = torch.device("cpu")


@pytest.fixture
def late() -> Iterator[None]:
    """Copies are made where they are waited for, and until then give no numbers."""

    def copy(target: torch.Tensor, source: torch.Tensor, back: bool) -> Callable[[], None]:
        del back
        target.fill_(torch.nan)

        def join() -> None:
            target.copy_(source)

        return join

    bind_copies("cpu", copy)
    yield
    unbind_copies("cpu")


def ran(stage: StageGraphs, kinds: tuple[object, ...]) -> dict[str, torch.Tensor]:
    """All that the pieces of a micro-batch make, but for what one keeps for another."""
    draw = torch.Generator().manual_seed(0)
    given = {
        i.name: torch.randn(i.spec.shape, dtype=i.spec.dtype, generator=draw) / 8
        for i in chain().forward.inputs
    }
    kept: dict[str, object] = {}
    found: dict[str, torch.Tensor] = {}
    ones = torch.ones(SIDE, SIDE, dtype=torch.float64)
    for graph in stage.pieces(kinds):  # type: ignore[arg-type]
        assert isinstance(graph, Graph)
        values = [
            kept[i.target] if i.target in kept else given.get(i.name, ones) for i in graph.inputs
        ]
        outs = compile_graph(graph, CPU)(values)
        kept |= {o.name: value for o, value in zip(graph.outputs, outs, strict=True)}
        found |= {o.name: v for o, v in zip(graph.outputs, outs, strict=True) if o.kind != "saved"}
    return found


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("kinds", [WHOLE, SPLIT])
def test_not_a_bit_changes_however_late_copies_end(kinds: tuple[object, ...]) -> None:
    stage, draw = chain(split=kinds is SPLIT), random.Random(0)
    wanted = ran(stage, kinds)
    for bytes_per_s in (1e7, 1e9, 1e11):
        place = at(bytes_per_s)
        for share in (1.0, draw.random(), draw.random()):
            some = moved(stage, chosen(stage, share, place), place)
            some.verify()
            found = ran(some, kinds)
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                assert torch.equal(found[key], value), (key, bytes_per_s, share)


def test_what_is_out_takes_no_memory_of_the_device() -> None:
    stage, place = chain(), at(1e12)
    some = moved(stage, chosen(stage, 0.5, place), place)
    before, after = (order_bytes(one, WHOLE)[0] for one in (stage, some))
    total = sum(one.size_bytes for one in movable(stage, place))
    assert after.host_bytes == total // 2
    assert before.held_bytes - after.held_bytes == after.host_bytes


def test_a_fast_link_hides_its_copies_and_a_slow_one_does_not() -> None:
    def slower(bytes_per_s: float, share: float) -> float:
        stage, place = chain(), at(bytes_per_s)
        some = moved(stage, chosen(stage, share, place), place)
        pairs = ((some.forward, stage.forward), (some.backward, stage.backward))
        after, before = (
            sum(graph_seconds(pair[k], place) for pair in pairs if pair[k]) for k in (0, 1)
        )
        return after / before - 1

    assert slower(1e11, 0.5) < 0.2 < slower(1e8, 0.5)
    assert slower(1e8, 0.2) < slower(1e8, 0.5) < slower(1e8, 1.0)


def test_a_slower_link_starts_to_bring_values_back_earlier() -> None:
    def ahead(bytes_per_s: float) -> int:
        stage, place = chain(), at(bytes_per_s)
        first = movable(stage, place)[0]
        some = moved(stage, {first.name: first.numel}, place)
        assert some.backward is not None
        ops = [n.op for n in some.backward.nodes]
        assert sum(n.op in (OUT, GONE) for n in some.forward.nodes) == 2
        return ops.index(WAIT) - ops.index(BACK)

    assert ahead(1e13) < ahead(5e9) < ahead(2e9)

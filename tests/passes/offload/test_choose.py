"""Which values go first, and how much of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.ir.graph import Output, OutputKind, Ref
from merakc.passes.offload.choose import chosen, movable
from tests.passes.offload.lines import LAYERS, SIDE, at, chain

NUMEL = SIDE * SIDE


@pytest.mark.parametrize("split", [False, True])
def test_values_go_first_that_are_made_first_and_read_last(split: bool) -> None:
    stage = chain(split=split)
    values = movable(stage, at(1e9))
    assert len(values) >= 2 * LAYERS - 1
    place = {o.name: o.ref.node for o in stage.forward.outputs}
    nodes = [n.name for n in stage.forward.nodes]
    made = [nodes.index(place[one.name]) for one in values]
    assert made[:3] == sorted(made)[:3]
    idle_s = [one.idle_s for one in values]
    assert idle_s == sorted(idle_s, reverse=True)


def test_of_the_last_value_a_part_moves() -> None:
    stage = chain()
    values = movable(stage, at(1e9))
    found = chosen(stage, 2.5 / len(values), at(1e9))
    assert list(found) == [one.name for one in values[:3]]
    assert list(found.values()) == [NUMEL, NUMEL, NUMEL // 2]
    assert chosen(stage, 0.0, at(1e9)) == {}
    assert sum(chosen(stage, 1.0, at(1e9)).values()) == NUMEL * len(values)


def test_what_shares_its_memory_stays() -> None:
    stage = chain()
    first = movable(stage, at(1e9))[0].name
    view = next(o for o in stage.forward.outputs if o.name == first)
    twice = Output("again", OutputKind.RESULT, Ref(view.ref.node))
    forward = replace(stage.forward, outputs=(*stage.forward.outputs, twice))
    assert first not in {one.name for one in movable(replace(stage, forward=forward), at(1e9))}

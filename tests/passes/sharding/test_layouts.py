from __future__ import annotations

from dataclasses import replace

import torch

from merakc.ir.graph import Node, Ref, TensorSpec
from merakc.ir.layout import parse_layout
from merakc.passes.sharding.layouts import SequenceSplit, Sharding

X, Y = Ref("x"), Ref("y")
WHOLE, PART = parse_layout("2 x 6 x 4"), parse_layout("2 x 6* x 4")
SPLIT = SequenceSplit(frozenset({"n"}), frozenset({X}), {X: PART, Y: PART})
SHARDING = Sharding(2, {X: WHOLE, Y: WHOLE}, frozenset(), (), (SPLIT,))


def test_a_rank_keeps_its_part_of_what_is_kept_in_parts() -> None:
    spec = TensorSpec((2, 6, 4), torch.float32)
    assert SHARDING.sequence_of(X) is SPLIT
    assert SHARDING.sequence_of(Y) is None  # a part of it is only read
    assert SHARDING.local_spec(X, spec, 1).shape == (2, 3, 4)
    assert SHARDING.local_spec(Y, spec, 1).shape == (2, 6, 4)


def test_a_node_reads_parts_where_it_computes_on_parts_and_gathered_values_elsewhere() -> None:
    spec = TensorSpec((2, 6, 4), torch.float32)
    inside = Node("n", "aten.add.Tensor", (X, Y), (), (spec,), False)
    specs, n, m = {X: spec, Y: spec, Ref("n"): spec, Ref("m"): spec}, Ref("n"), Ref("m")
    sharding = replace(
        SHARDING,
        layouts={**SHARDING.layouts, n: WHOLE, m: WHOLE},
        sequences=(replace(SPLIT, kept=frozenset({X, n}), layouts={X: PART, Y: PART, n: PART}),),
    )
    seen = sharding.node_specs(inside, specs, 0)
    assert {ref: s.shape for ref, s in seen.items()} == dict.fromkeys((X, Y, n), (2, 3, 4))
    seen = sharding.node_specs(replace(inside, name="m"), specs, 0)
    assert {ref: s.shape for ref, s in seen.items()} == dict.fromkeys((X, Y, m), (2, 6, 4))


def test_a_value_that_crosses_has_two_names() -> None:
    crossing = Ref("act:x")
    renamed = SHARDING.renamed({X: crossing})
    spec = TensorSpec((2, 6, 4), torch.float32)
    for ref in (X, crossing):
        assert renamed.local_spec(ref, spec, 0).shape == (2, 3, 4)
        assert renamed.layouts[ref] == WHOLE

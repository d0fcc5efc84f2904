from __future__ import annotations

import torch

from merakc.ir.graph import Ref, TensorSpec
from merakc.ir.layout import parse_layout
from merakc.passes.sharding import SequenceSplit, Sharding

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


def test_a_value_that_crosses_has_two_names() -> None:
    crossing = Ref("act:x")
    renamed = SHARDING.renamed({X: crossing})
    spec = TensorSpec((2, 6, 4), torch.float32)
    for ref in (X, crossing):
        assert renamed.local_spec(ref, spec, 0).shape == (2, 3, 4)
        assert renamed.layouts[ref] == WHOLE

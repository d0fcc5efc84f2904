"""Pieces for any number of samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpt import Shape, gpt_graph
from merakc.costs.work.pieces import Piece, cut_pieces
from merakc.costs.work.scaled import SAMPLES, scaled

SHAPE = Shape(64, 4, 4, 16, 128)


def pieces(samples: int, tp: int = 1) -> tuple[Piece, ...]:
    return cut_pieces(gpt_graph(SHAPE, samples, tp))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pieces_are_those_of_a_recording(samples: int, tp: int) -> None:
    found = scaled([pieces(n, tp) for n in SAMPLES], samples)
    assert found is not None
    for one, other in zip(found, pieces(samples, tp), strict=True):
        assert one.work == other.work
        assert (one.saved_bytes, one.handed_bytes) == (other.saved_bytes, other.handed_bytes)
        assert one.parameter_count == other.parameter_count
    blocks = [id(p) for p in found if p.path]
    assert len(set(blocks)) < len(blocks) == SHAPE.layers


def test_pieces_that_are_not_alike_say_nothing_of_others() -> None:
    fewer, more = (pieces(n) for n in SAMPLES)
    assert scaled([fewer[1:], more], 4) is None
    assert scaled([fewer, (replace(more[0], path="other"), *more[1:])], 4) is None
    assert scaled([fewer, (replace(more[0], work=more[1].work), *more[1:])], 4) is None

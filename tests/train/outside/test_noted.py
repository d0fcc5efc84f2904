"""Calls on outputs that were noted, made again on values and by the model itself."""

from __future__ import annotations

import torch
from torch import nn

from merakc.train.outside.noted import Extra, Noted, Replay, Slot, forward, key_of

NO_CAST = torch.bfloat16, False


def noted(func: object, *args: object, first: int) -> Noted:
    key = key_of(func, args, {}, True, NO_CAST)  # type: ignore[arg-type]
    return Noted(func, args, {}, first, key, True, NO_CAST, "loop.py:1")  # type: ignore[arg-type]


def test_a_call_reads_its_places_and_moves_with_them() -> None:
    call = noted(torch.add, Slot(0), Extra(1), first=2)
    assert (call.name, call.reads(), call.extras()) == ("add", {0}, {1})
    values, extras = {0: torch.ones(2), 7: torch.ones(2) * 7}, {1: torch.ones(2), 3: torch.zeros(2)}
    [out] = call.run(values.__getitem__, extras, "cpu")
    assert out.tolist() == [2.0, 2.0]
    moved = call.moved(7, {1: 3})
    assert (moved.first, moved.reads(), moved.extras()) == (9, {7}, {3})
    assert moved.key != call.key == noted(torch.add, Slot(0), Extra(1), first=5).key
    assert moved.run(values.__getitem__, extras, "cpu")[0].tolist() == [7.0, 7.0]


def test_a_replay_calls_the_model_again_where_that_was_noted() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    calls = [noted(forward, Extra(0), first=1), noted(torch.mul, Slot(0), Slot(1), first=2)]
    replay = Replay(model, calls, 2, [1])
    out = replay(torch.ones(1, 2), outside_tensors={0: torch.ones(1, 2) * 3})
    assert out.loss.item() == 12.0
    assert out.outputs["1"].item() == 6.0
    assert [name for name, _ in replay.named_parameters()] == ["weight"]

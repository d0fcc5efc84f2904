"""Alternatives are values that a plan's file can hold."""

from __future__ import annotations

import json
from dataclasses import asdict

import pydantic

from merakc.ir.alternatives import Alternative, Alternatives, Refusal
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy

OTHER = Strategy(8, batch_size=4, micro_batches=4, state_shards=(StateShards(1, 1, 8),))
OTHERS = Alternatives(
    (Alternative(OTHER, 0.25, 1 << 30, "waits for dp"),),
    (Refusal("tp 16", "12 heads do not divide over 16 ranks", "use tp 4 or 12"),),
)


def test_they_come_back_from_json() -> None:
    text = json.dumps(asdict(OTHERS))
    found = pydantic.TypeAdapter(Alternatives).validate_python(json.loads(text))
    assert found == OTHERS


def test_both_are_empty_where_nothing_is_said() -> None:
    assert Alternatives() == Alternatives((), ())

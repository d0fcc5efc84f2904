"""Users are told once what is done otherwise than they may expect."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

from merakc.frontend.regions import WHY
from merakc.ir.batches import PER_MICRO_BATCH, WHOLE_BATCH
from merakc.train.told import warn_of


def told(couplings: str, *unheard: str) -> list[str]:
    modules = [
        SimpleNamespace(name="encoder", reason="a loop", source="model.py:3", flops_share=0.5),
        SimpleNamespace(name="", reason=WHY, source="model.py:4", flops_share=0.001),
    ]
    lines = ("BatchNorm over each micro-batch",)
    plan: Any = SimpleNamespace(
        tp=2, opaque_modules=modules, couplings=couplings, conventions=lines
    )
    recording: Any = SimpleNamespace(aside=SimpleNamespace(unheard=unheard))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of(plan, recording)
    return [str(w.message) for w in found]


def test_what_is_told() -> None:
    first, second = told(WHOLE_BATCH, "a line prints, at train.py:7")
    assert "module 'encoder' cannot be recorded and runs as it is" in first
    assert "2 tp ranks: a loop, at model.py:3. It is 50%" in first
    assert second == "a line prints, at train.py:7"
    assert told(PER_MICRO_BATCH)[1:] == ["by convention: BatchNorm over each micro-batch"]

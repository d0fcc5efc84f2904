"""Checks of our ops: they pass on a CPU, and find what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from merakc.gpu_check import ops

CPU = torch.device("cpu")


def test_attention_is_its_formulas() -> None:
    cases = [*ops.attention_cases()]
    assert len(cases) == 192
    assert {case["mask"] for case in cases} == {None, "bool", "float", "rows"}
    for case in cases[::17]:
        allowed = ops.ALLOWED[case["dtype"]]
        assert all(error <= allowed for error in ops.attention_errors(CPU, **case).values())


def test_losses_in_blocks_are_their_formulas() -> None:
    errors = ops.scores_errors(CPU, (33, 16, 5000), torch.float32, bias=True)
    assert errors.keys() == {"total", "picked", "dw", "dx", "dbias"}
    assert max(errors.values()) <= ops.ALLOWED[torch.float32]


def test_products_of_float8_are_those_of_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = ops.scaled_errors(CPU, (100, 24, 40))
    assert errors.keys() == {"out", "dx", "dw"}
    assert 0 < max(errors.values()) <= ops.ALLOWED[torch.bfloat16]
    monkeypatch.setattr(ops, "ALLOWED", {torch.bfloat16: 1e-4})
    monkeypatch.setattr(ops, "scaled_errors", lambda _, sizes: {"out": 1e-3 * sizes[0]})
    assert ops.check_scaled(CPU)[0] == "sizes=(64, 64, 64): out 6.4e-02"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not ops.check_scaled(torch.device("cuda"))


def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.reference

    def shifted(*given: Any) -> Any:
        out, logsumexp = real(*given)
        return out + 0.1, logsumexp

    monkeypatch.setattr(ops, "reference", shifted)
    monkeypatch.setattr(ops, "attention_cases", lambda: iter([CASE]))
    (line,) = ops.check_attention(CPU)
    assert line.startswith("sizes=(1, 2, 2, 8, 8, 16, 16), dtype=torch.float32")
    assert "out " in line


CASE = {"sizes": (1, 2, 2, 8, 8, 16, 16), "dtype": torch.float32, "mask": None, "causal": True}


def test_an_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(ops, "attention_errors", fails)
    monkeypatch.setattr(ops, "attention_cases", lambda: iter([CASE]))
    (line,) = ops.check_attention(CPU)
    assert line.endswith("RuntimeError: CUDA error")

"""The dtypes of mixed precision, and those that are refused."""

from __future__ import annotations

import pytest
import torch

from merakc.equality.casts import lifted_casts
from merakc.errors import ConfigError
from merakc.ir.precision import Precision, parse_precision


def test_names() -> None:
    found = parse_precision("bf16-mixed")
    assert found == Precision("bfloat16", "bfloat16", "float32")
    assert found is not None
    assert found.dtype("compute") == torch.bfloat16
    assert not found.scales_loss
    half = parse_precision("fp16-mixed")
    assert half is not None
    assert half.scales_loss
    eight = parse_precision("fp8-mixed")
    assert eight == Precision("bfloat16", "bfloat16", products="float8")
    assert str(eight).startswith("bfloat16 (products of float8) with gradients of bfloat16")
    assert parse_precision(None) is None
    assert parse_precision(found) is found


def test_unknown_names_and_narrow_masters_are_refused() -> None:
    with pytest.raises(ConfigError, match="'bf16' is not known; choose one of bf16-mixed"):
        parse_precision("bf16")
    with pytest.raises(ConfigError, match="dtype 'int8' is not one of bfloat16"):
        Precision("int8", "float32")
    with pytest.raises(ConfigError, match="products of 'int8' are not 'float8' or None"):
        Precision("bfloat16", "float32", products="int8")
    with pytest.raises(ConfigError, match="need another compute than float16"):
        Precision("float16", "float16", products="float8")
    with pytest.raises(ConfigError, match="masters of bfloat16 do not hold"):
        Precision("float16", "float16", "bfloat16")


def test_a_mode_that_lifts_casts_does_not_reach_it() -> None:
    with lifted_casts():
        assert Precision("bfloat16", "bfloat16").master == "float32"

"""Steps that no rank takes, and the scale of the loss."""

from __future__ import annotations

import pytest
import torch

from merakc.errors import ConfigError, MerakWarning
from merakc.ir.precision import Precision, parse_precision
from merakc.runtime.loss_scale import (
    GROWTH_INTERVAL,
    LEAST_SCALE,
    LossScale,
    _unscale_by_norms,
    check_on_nonfinite,
    loss_scale_for,
)


def finite(scale: LossScale, **gradients: torch.Tensor) -> bool:
    """A step of one rank."""
    bad = scale.nonfinite(gradients)
    found = bad is None or not bad
    scale.goes_on(finite=found)
    return found


def test_which_precision_scales() -> None:
    half = loss_scale_for(parse_precision("fp16-mixed"), None)
    assert (half.dynamic, half.scale, half.on_nonfinite) == (True, 65536.0, "skip")
    for precision in (Precision("bfloat16", "float32"), None):
        wide = loss_scale_for(precision, None)
        assert (wide.dynamic, wide.scale, wide.on_nonfinite) == (False, 1.0, "raise")
    assert loss_scale_for(parse_precision("fp16-mixed"), "raise").on_nonfinite == "raise"
    with pytest.raises(ConfigError, match="found by leaving steps out"):
        loss_scale_for(parse_precision("fp16-mixed"), "ignore")


def test_the_scale_is_taken_out_and_follows_what_is_found() -> None:
    scale = LossScale(True, 8.0)
    gradients = {"a": torch.full((3,), 16.0), "none": torch.empty(0), "b": torch.tensor(-4.0)}
    assert finite(scale, **gradients)
    assert gradients["a"].tolist() == [2.0] * 3
    assert gradients["b"].item() == -0.5
    assert not finite(scale, a=torch.tensor([1.0, torch.inf]))
    assert (scale.scale, scale.skipped) == (4.0, 1)
    for _ in range(GROWTH_INTERVAL):
        assert finite(scale)
    assert (scale.scale, scale.skipped) == (8.0, 1)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_every_dtype_and_kind_is_seen_beside_others(dtype: torch.dtype, value: float) -> None:
    scale = LossScale(False, 1.0, "skip")
    good = {"a": torch.ones(70), "b": torch.ones(3, dtype=torch.float64), "c": torch.ones(4, 4).t()}
    assert finite(scale, **good)
    bad = torch.ones(33, 3, dtype=dtype)
    assert finite(scale, **good, d=bad)
    assert bad.eq(1).all()
    bad[32, 1] = value
    with pytest.warns(MerakWarning):
        assert not finite(scale, d=bad, **good)


@pytest.mark.parametrize("value", [1.0, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_norms_tell_what_torchs_kernel_does(value: float, factor: float) -> None:
    tensors = [torch.ones(3, dtype=torch.bfloat16), torch.full((2, 2), value).bfloat16()]
    other, (bad, wanted) = [t.clone() for t in tensors], (torch.zeros(1) for _ in range(2))
    _unscale_by_norms(tensors, bad, factor)
    torch._amp_foreach_non_finite_check_and_unscale_(other, wanted, torch.tensor([factor]))
    assert torch.equal(bad, wanted)
    for one, two in zip(tensors, other, strict=True):
        assert torch.equal(one.nan_to_num(), two.nan_to_num())


def test_a_nan_is_warned_of_where_no_smaller_scale_can_help() -> None:
    scale = LossScale(False, 1.0, "skip")
    with pytest.warns(MerakWarning, match=r"all ranks skip this step \(1 so far\)"):
        assert not finite(scale, a=torch.tensor(torch.nan))
    assert scale.scale == 1.0
    assert not LossScale(True, 1.0, "raise").goes_on(finite=False)
    assert LossScale(True, 4.0, "raise").goes_on(finite=False)


def test_the_scale_has_a_floor() -> None:
    scale = LossScale(True, 8.0, "skip")
    for _ in range(1200):
        scale.scale = min(scale.scale, 1.0)  # it is warned of from here on
        with pytest.warns(MerakWarning, match="all ranks skip this step"):
            finite(scale, a=torch.tensor(torch.nan))
    assert (scale.scale, scale.skipped) == (LEAST_SCALE, 1200)
    assert finite(scale, a=torch.tensor(1.0))


def test_what_is_ignored_is_not_looked_at() -> None:
    assert LossScale(False, 1.0, "ignore").nonfinite({"a": torch.tensor(torch.nan)}) is None
    check_on_nonfinite(None)
    with pytest.raises(ConfigError, match="on_nonfinite='no': what to do"):
        check_on_nonfinite("no")


def test_the_default_dtype_is_the_users_own_matter() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert finite(LossScale(True, 4.0, "skip"), a=torch.tensor([1.0, 2.0]))
    finally:
        torch.set_default_dtype(torch.float32)

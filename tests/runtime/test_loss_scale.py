"""Steps that no rank takes, and the scale of the loss."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.errors import MerakWarning
from merakc.ir.precision import Precision, parse_precision
from merakc.runtime.loss_scale import GROWTH_INTERVAL, LEAST_SCALE, LossScale, loss_scale_for


def test_which_precision_scales() -> None:
    half = loss_scale_for(parse_precision("fp16-mixed"))
    assert half is not None
    assert (half.dynamic, half.scale) == (True, 65536.0)
    wide = loss_scale_for(Precision("bfloat16", "float32"))
    assert wide is not None
    assert (wide.dynamic, wide.scale) == (False, 1.0)
    assert loss_scale_for(None) is None


def test_the_scale_is_taken_out_and_follows_what_is_found() -> None:
    scale = LossScale(True, 8.0)
    gradients = {"a": torch.full((3,), 16.0), "none": torch.empty(0), "b": torch.tensor(-4.0)}
    assert scale.finite(gradients, None)
    assert gradients["a"].tolist() == [2.0] * 3
    assert gradients["b"].item() == -0.5
    assert not scale.finite({"a": torch.tensor([1.0, torch.inf])}, None)
    assert (scale.scale, scale.skipped) == (4.0, 1)
    for _ in range(GROWTH_INTERVAL):
        assert scale.finite({}, None)
    assert (scale.scale, scale.skipped) == (8.0, 1)


def test_a_nan_is_warned_of_where_no_smaller_scale_can_help() -> None:
    scale = LossScale(False, 1.0)
    with pytest.warns(MerakWarning, match=r"all ranks skip this step \(1 so far\)"):
        assert not scale.finite({"a": torch.tensor(torch.nan)}, None)
    assert scale.scale == 1.0


def test_the_scale_has_a_floor() -> None:
    scale = LossScale(True, 8.0)
    for _ in range(1200):
        scale.scale = min(scale.scale, 1.0)  # it is warned of from here on
        with pytest.warns(MerakWarning, match="all ranks skip this step"):
            scale.finite({"a": torch.tensor(torch.nan)}, None)
    assert (scale.scale, scale.skipped) == (LEAST_SCALE, 1200)
    assert scale.finite({"a": torch.tensor(1.0)}, None)


def one_bad_rank() -> tuple[bool, float]:
    scale = LossScale(True, 8.0)
    value = torch.tensor(torch.nan if dist.get_rank() == 1 else 1.0)
    return scale.finite({"a": value}, dist.group.WORLD), scale.scale


def test_all_ranks_skip_if_one_does() -> None:
    assert run_ranks(2, one_bad_rank) == [(False, 4.0)] * 2

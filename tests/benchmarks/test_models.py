"""The cases are what they say: deterministic, uneven, and casting where they claim to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.models import EQUIVALENCE_MODELS, MODELS
from benchmarks.reference import split_batch
from merakc.equality.casts import _products, lifted_casts

CASES = pytest.mark.parametrize("name", MODELS)


class _Float32Seen(TorchFunctionMode):
    """Notes whether a result is float32; groups of rows are multiplied for torch, which cannot."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._grouped_mm and args[0].dtype == torch.float64:
            return _products(args[0], args[1], kwargs["offs"])
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.requires_grad and out.dtype == torch.float32:
            self.seen = True
        return out


@CASES
def test_a_float64_model_casts_exactly_where_the_case_says_so(name: str) -> None:
    case = MODELS[name]
    model, batch = case.model(torch.float64), case.batch(2, torch.float64)
    with _Float32Seen() as mode:
        model(**batch)
    assert mode.seen == case.casts_float32


@pytest.mark.parametrize("name", [n for n, c in MODELS.items() if not c.running_statistics])
def test_the_loss_is_a_mean_over_the_valid_labels(name: str) -> None:
    """Weighing two halves by their valid labels gives the loss of the whole; not so BatchNorm."""
    case = MODELS[name]
    model, batch = case.model(torch.float64), case.batch(8, torch.float64)
    halves = split_batch(batch, 2)
    counts = [case.valid_labels(half) for half in halves]
    assert sum(counts) == case.valid_labels(batch)
    with lifted_casts():
        *losses, whole = (model(**part)["loss"].item() for part in (*halves, batch))
    mean = sum(a * n for a, n in zip(losses, counts, strict=True)) / sum(counts)
    assert mean == pytest.approx(whole, rel=1e-6)


@CASES
def test_weights_and_batches_are_the_same_every_time(name: str) -> None:
    case = MODELS[name]
    one, other = case.model().state_dict(), case.model().state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)
    for key, value in case.batch(4, seed=3).items():
        assert torch.equal(value, case.batch(4, seed=3)[key])
    assert any(not torch.equal(v, case.batch(4, seed=4)[k]) for k, v in case.batch(4).items())


@CASES
def test_dropout_reaches_the_model(name: str) -> None:
    case = MODELS[name]
    batch = case.batch(4)
    torch.manual_seed(0)
    losses = {p: [case.model(dropout=p)(**batch)["loss"].item() for _ in "ab"] for p in (0.0, 0.5)}
    assert losses[0.0][0] == losses[0.0][1]
    assert losses[0.5][0] != losses[0.5][1]


def test_micro_batches_hold_different_numbers_of_labels() -> None:
    for name in EQUIVALENCE_MODELS:
        case = MODELS[name]
        batch = case.batch(8, seed=1000)
        if "pixel_values" not in batch:
            assert len({case.valid_labels(part) for part in split_batch(batch, 4)}) > 1, name


def test_some_vocabularies_divide_by_nothing() -> None:
    heads = [MODELS[name].model().state_dict() for name in ("gpt2", "qwen2", "bert")]
    assert all(any(t.shape[:1] == (131,) for t in state.values()) for state in heads)

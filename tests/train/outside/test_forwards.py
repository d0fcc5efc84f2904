from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.ranks import run_ranks
from merakc.train.steps import Steps
from tests.battery.small_models import Words, assert_close, build, gradients, parallel, words


class CompiledError(Exception):
    """A step was compiled."""


def refuse(*_: Any, **__: Any) -> None:
    """In place of what compiles."""
    raise CompiledError


def stepped(model: Any, batch: Any) -> Any:
    """The loss and the gradients of a step."""
    loss = model(**batch)["loss"]
    loss.backward()
    return loss.detach()


def test_steps_of_warm_shapes_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = parallel(Words, words(0), micro_batches=2), build(Words)
    empty = {n: torch.empty_like(x, device="meta") for n, x in words(0, length=9).items()}
    model.warm([empty, words(0, batch_size=4)])
    monkeypatch.setattr(Steps, "_lowered", refuse)
    for batch in (words(1, length=9), words(1, batch_size=4)):
        plain.zero_grad()
        model.zero_grad()
        torch.testing.assert_close(stepped(model, batch), stepped(plain, batch))
        assert_close(model.full_gradients(), gradients(plain))
    with pytest.raises(CompiledError):
        model(**words(1, length=10))
    with pytest.raises(CompiledError):
        model.eval()(**words(1, length=9))


def test_in_eval_mode_their_forwards_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallel(Words, words(0)).eval()
    model.warm([words(0, length=9)])
    monkeypatch.setattr(Steps, "_lowered", refuse)
    assert model(**words(2, length=9))["loss"] > 0
    with pytest.raises(CompiledError):
        model.train()(**words(2, length=9))


def test_on_ranks_that_have_unlike_numbers_of_samples() -> None:
    def run() -> float:
        model = parallel(Words, words(0), dp=2)
        own = words(0, batch_size=(4, 2)[model.rank])
        model.warm([own])
        Steps._lowered = refuse  # type: ignore[assignment, method-assign]
        return float(stepped(model, own))

    first, second = run_ranks(2, run)
    assert first == second

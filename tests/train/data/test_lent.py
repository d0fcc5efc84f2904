"""Ranks of a replica that are given None take part in steps with the others' batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import merakc
from benchmarks.faults.work import Small, batch
from merakc.equality.ranks import run_ranks
from merakc.errors import MismatchError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.model import ParallelModel


def given(samples: int = 8) -> dict[str, torch.Tensor]:
    return {n: t.double() if t.is_floating_point() else t for n, t in batch(samples).items()}


def made(**degrees: Any) -> ParallelModel:
    torch.manual_seed(0)
    return merakc.auto_parallel(Small().double(), given(), cluster=NOMINAL_CPU, **degrees)


def trained(model: Any, parts: list[dict[str, Any]]) -> list[torch.Tensor]:
    """What steps, an evaluation and a prediction give; each call is given the next part."""
    calls, found = iter(parts), list[torch.Tensor]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        loss = model(**next(calls))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    model.eval()
    with torch.inference_mode():
        found.append(model(**next(calls))["loss"].clone())
    with torch.no_grad():
        found.append(getattr(model, "predict", model)(**next(calls))["logits"])
    return found


def on_ranks() -> tuple[list[torch.Tensor], str]:
    model, own = made(dp=2, pp=2), list[dict[str, Any]]()
    replica, (_, stage, _) = model.data_parallel_rank, model.plan.mesh.coordinates(model.rank)
    for samples in (8, 4, 8, 4):  # the first stage reads x, the last one labels
        part = {n: t.chunk(2)[replica] for n, t in given(samples).items()}
        own.append({"x": part["x"], "labels": None} if stage == 0 else {"labels": part["labels"]})
    own[1] = {} if stage else {n: t.chunk(2)[replica] for n, t in given(4).items()}
    own[3] = {"x": None} if stage else {"x": given(4)["x"].chunk(2)[replica]}
    found = trained(model, own)
    with pytest.raises(MismatchError) as nobody:
        model(x=None, labels=None)
    return found, str(nobody.value)


def test_they_train_and_evaluate_as_one_process() -> None:
    torch.manual_seed(0)
    plain = trained(Small().double(), [given(8), given(4), given(8), {"x": given(4)["x"]}])
    for rank, (found, nobody) in enumerate(run_ranks(4, on_ranks)):
        torch.testing.assert_close(found[:3], plain[:3], rtol=1e-10, atol=0)
        logits = plain[3].chunk(2)[rank // 2]
        torch.testing.assert_close(found[3], logits, rtol=1e-10, atol=1e-12)
        assert "was given a batch for model(...): at least one of them must be" in nobody


def later() -> str:
    model = made(tp=2, dp=1, pp=1)
    model(**given())["loss"].backward()
    with pytest.raises(MismatchError) as caught:
        model(**({} if model.rank else given()))
    return str(caught.value)


def test_none_at_a_later_call_alone_is_refused() -> None:
    for text in run_ranks(2, later):
        assert "no batch and no tensors (ranks that are given None have the others' batch" in text
        assert "from the model's first call on" in text

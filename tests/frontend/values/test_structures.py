"""Dataclasses are taken apart and put together like dicts, in batches and results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

import merakc
from merakc.errors import RecordError
from merakc.frontend.record import record
from merakc.frontend.values.structures import open_dataclasses
from merakc.machines.cluster import NOMINAL_CPU
from tests.frontend.small import Small, linear, randn


@dataclass
class Words:
    x: Tensor
    labels: Tensor
    weights: list[float] = field(default_factory=lambda: [2.0])


@dataclass(frozen=True, slots=True)
class Pair:
    words: Words
    name: str


@dataclass
class Result:
    """Its constructor counts."""

    logits: Tensor
    nll: Tensor
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


class Model(nn.Module):
    """A model that is given a dataclass and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(6, 3)

    def forward(self, pair: Pair) -> Result:
        """Nested in and out."""
        logits = self.layer(pair.words.x) * pair.words.weights[0]
        return Result(logits, F.mse_loss(logits, pair.words.labels))


def test_fields_are_leaves() -> None:
    pair = Pair(Words(torch.ones(1), torch.zeros(1)), "a")
    open_dataclasses([pair])
    leaves, structure = pytree.tree_flatten_with_path({"pair": pair})
    assert [pytree.keystr(path) for path, _ in leaves] == [
        "['pair'].words.x", "['pair'].words.labels", "['pair'].words.weights[0]", "['pair'].name",
    ]  # fmt: skip
    again = pytree.tree_unflatten([x for _, x in leaves], structure)["pair"]
    assert again == pair
    result = Result(torch.ones(1), torch.ones(()))
    open_dataclasses(result)
    assert pytree.tree_map(lambda x: x, result).made == 1


def test_a_step_on_dataclasses() -> None:
    torch.manual_seed(0)
    model = Model()
    pair = Pair(Words(randn(8, 6), randn(8, 3)), "a")
    wanted = model(pair)
    wanted.nll.backward()
    gradient = model.layer.weight.grad
    parallel = merakc.auto_parallel(model, pair, micro_batches=4, cluster=NOMINAL_CPU)
    out = parallel(pair)
    assert isinstance(out, Result)
    assert out.nll.item() == pytest.approx(wanted.nll.item(), rel=1e-12)
    out.nll.backward()
    torch.testing.assert_close(parallel.full_gradients()["layer.weight"], gradient)
    torch.testing.assert_close(parallel.predict(pair).logits, wanted.logits.detach())


class Box:
    """An object of a class that torch's trees do not know."""

    def __init__(self, x: Any) -> None:
        self.held = {"x": x}


@pytest.mark.parametrize("kind", [Box, lambda x: x.numpy()])
def test_what_cannot_be_split_is_refused(kind: Any) -> None:
    model = Small(lambda s, x, box: s.layer(x).sum(), layer=linear())
    name = "Box" if kind is Box else np.ndarray.__name__
    with pytest.raises(RecordError, match=f"'1' of the batch is of type {name}"):
        record(model, (randn(4, 6), kind(randn(4, 6))), {})

"""A model that communicates by itself is refused with its line, also where it runs as it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from merakc.errors import RecordError
from merakc.frontend.record import record
from tests.frontend.small import Small, linear, randn


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "a sum": lambda y: dist.all_reduce(y.detach().clone()),
    "a gather": lambda y: dist.all_gather([torch.empty_like(y)], y),
    "a message": lambda y: dist.isend(y, 0),
    "a barrier": lambda y: dist.barrier(),
    "the number of ranks": lambda y: dist.get_world_size(),
    "their environment": lambda y: os.environ.get("WORLD_SIZE", "1"),
    "their environment, by os.getenv": lambda y: os.getenv("LOCAL_WORLD_SIZE"),
    "objects": lambda y: dist.broadcast_object_list([1], 0),
    "functional": lambda y: functional.all_reduce(y, "sum", dist.group.WORLD),
}


@pytest.mark.parametrize("branching", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused_with_the_line(name: str, branching: bool) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y: Tensor = s.layer(x)
        if branching and y.sum() > 0:
            y = y * 2
        CALLS[name](y)
        return y

    inner = Small(forward, layer=linear())
    model = Small(lambda s, x: s.inner(s.layer(x)).sum(), layer=linear(), inner=inner)
    # What runs as it is may be refused for that first.
    told = r"the forward communicates" + "|control flow depends on the data" * branching
    with pytest.raises(RecordError, match=rf"test_communication.py:\d+: .*({told})"):
        record(model, (randn(4, 6),), {})

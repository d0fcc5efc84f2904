from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.machines.start import device_of, start_distributed

CPU = torch.device("cpu")


def test_the_device_that_was_asked_for() -> None:
    assert device_of("meta") == torch.device("meta")
    assert device_of(CPU) == CPU


def test_a_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device_of(None) == torch.device("cuda", 3)
    assert chosen == [torch.device("cuda", 3)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(None) == CPU


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert start_distributed(CPU) == 1
    assert not dist.is_initialized()


def test_a_group_that_is_there_is_used() -> None:
    assert run_ranks(2, start_distributed, CPU) == [2, 2]


def _refused() -> str:
    with pytest.raises(ConfigError) as caught:
        start_distributed(torch.device("meta"))
    return str(caught.value)


def test_a_group_without_the_device_is_refused() -> None:
    assert "no backend for meta" in run_ranks(1, _refused)[0]

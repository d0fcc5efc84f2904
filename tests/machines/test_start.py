from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.machines.start import LOCAL_RANKS, _leave, device_of, start_distributed

CPU = torch.device("cpu")


def test_the_device_that_was_asked_for() -> None:
    assert device_of("meta") == torch.device("meta")
    assert device_of(CPU) == CPU


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Four GPUs of which none is current, and no launcher; the devices that are made current."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(chosen))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1].index)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    return chosen


@pytest.mark.parametrize("launcher", LOCAL_RANKS)
@pytest.mark.parametrize("asked", [None, "cuda", torch.device("cuda")])
def test_a_rank_has_its_own_gpu(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch, launcher: str, asked: Any
) -> None:
    monkeypatch.setenv(launcher, "3")
    assert device_of(asked) == torch.device("cuda", 3)
    assert gpus == [torch.device("cuda", 3)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each rank is shown one alone
    assert device_of(asked) == torch.device("cuda", 0)


def test_a_gpu_that_was_chosen_is_used(gpus: list[torch.device]) -> None:
    assert device_of("cuda:2") == torch.device("cuda", 2)
    assert device_of(None) == torch.device("cuda", 2)  # it is current now
    assert gpus == [torch.device("cuda", 2)] * 2
    with pytest.raises(ConfigError, match=r"GPU 5 here .* sees 4; .* device="):
        device_of("cuda:5")


def test_without_gpus_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(None) == CPU
    with pytest.raises(ConfigError, match="sees 0"):
        device_of("cuda")


def _on_gpus(of_rank: dict[int, str]) -> str:
    class Properties:
        uuid = of_rank[dist.get_rank()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
        patch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
        try:
            return str(start_distributed(torch.device("cuda", 0)))
        except ConfigError as error:
            return str(error)


def test_two_ranks_with_one_gpu_are_refused() -> None:
    assert run_ranks(3, _on_gpus, {0: "a", 1: "b", 2: "c"}) == ["3"] * 3
    for told in run_ranks(3, _on_gpus, {0: "a", 1: "b", 2: "b"}):
        assert told.startswith("ranks 1 and 2 have the same GPU (b of ")


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


def test_a_process_group_that_its_user_has_destroyed_is_left_alone() -> None:
    assert not dist.is_initialized()
    _leave()

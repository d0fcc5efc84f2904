"""Checks of a machine: each can fail, and then says what to do."""

from __future__ import annotations

import socket
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from merakc.cli import health
from merakc.cli.health import Check, all_checks, all_reduce, devices, settings, version
from merakc.kernels import gemm


def _status(check: Check) -> tuple[str, bool]:
    return check.status, bool(check.remedy)


def test_this_machine_has_what_tests_need() -> None:
    found = {check.name: check for check in all_checks({"OMP_NUM_THREADS": "1"})}
    for name in ("Python", "torch", "pymetis", "gloo", "all-reduce of 2 ranks by gloo", "CPU"):
        assert found[name].status == "ok", found[name]
    assert found["torch"].found == metadata.version("torch")
    assert all(check.remedy for check in found.values() if check.status != "ok")
    assert "ruff" not in found, "what developers need is none of a user's business"
    assert "memory" in found


@pytest.mark.parametrize(
    ("requirement", "extra", "status", "text"),
    [
        ("torch>=2.0", "", "ok", ""),
        ("torch>=99", "", "fail", "pip install -U 'torch>=99'"),
        ("no-such-package>=1", "", "fail", "pip install 'no-such-package>=1'"),
        ("no-such-package>=1", "hf", "warn", "pip install merakc[hf]"),
        ("torch>=99", "hf", "fail", "pip install -U merakc[hf]"),
    ],
)
def test_versions(requirement: str, extra: str, status: str, text: str) -> None:
    found = version(Requirement(requirement), extra)
    assert (found.status, found.remedy) == (status, text)


def test_an_all_reduce_that_fails_or_gives_another_sum_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all_reduce("gloo", 2).status == "ok"
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    found = all_reduce("gloo", 2)
    assert (found.status, found.found) == ("fail", "gave [1.0, 1.0]")

    def torn(_: torch.Tensor) -> None:
        raise RuntimeError("torn")

    monkeypatch.setattr(dist, "all_reduce", torn)
    found = all_reduce("gloo", 2)
    assert (found.status, found.found) == ("fail", "RuntimeError: torn")
    assert found.remedy


def test_room(tmp_path: Path) -> None:
    assert health.shared_memory(tmp_path, 1).status == "ok"
    assert _status(health.shared_memory(tmp_path, 1 << 60)) == ("warn", True)
    assert _status(health.shared_memory(tmp_path / "none")) == ("fail", True)
    assert health.open_files(1).status == "ok"
    assert health.open_files(1 << 40).status in ("warn", "ok")  # ok where there is no limit


def test_a_name_that_does_not_resolve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    found = health.host_name()
    assert found.status == "warn"
    assert "does not resolve" in found.found
    assert "/etc/hosts" in found.remedy


@pytest.mark.parametrize(
    ("environment", "name", "status", "text"),
    [
        ({}, "OMP_NUM_THREADS", "warn", "is not set"),
        ({"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS", "ok", "2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "launcher", "warn", "RANK, WORLD_SIZE are set"),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE", "warn", "1: keeps GPUs"),
        ({"NCCL_SOCKET_IFNAME": "=moon0"}, "NCCL_SOCKET_IFNAME", "fail", "no interface moon0"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "GLOO_SOCKET_IFNAME", "ok", "lo"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, "NCCL_SOCKET_IFNAME", "ok", "docker"),
    ],
)
def test_settings(environment: dict[str, str], name: str, status: str, text: str) -> None:
    found = {check.name: check for check in settings(environment)}[name]
    assert found.status == status
    assert text in found.found
    assert bool(found.remedy) is (status != "ok")


def test_what_is_off_is_not_told() -> None:
    off = {"OMP_NUM_THREADS": "1", "NCCL_P2P_DISABLE": "0", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    assert [check.name for check in settings(off)] == ["OMP_NUM_THREADS"]


@pytest.mark.parametrize(
    ("gain", "text"), [(2.0, "oneDNN's, 2.0 times as fast as torch's"), (1.0, "torch's")]
)
def test_what_multiplies_is_told(gain: float, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "gain", lambda: gain)
    assert {check.name: check.found for check in devices()}["products of float32"] == text

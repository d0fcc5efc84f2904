"""Memory that a process lets go of, and asks for again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from merakc.runtime.allocator import KeptMemory, keep_freed_memory

CODE = """
import resource
import torch
from merakc.runtime.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        [torch.ones(1 << 20) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
kept = keep_freed_memory()
first = faults()
print(int(kept is not None), first, faults())
"""


def run(**variables: str) -> list[int]:
    found = subprocess.run(
        [sys.executable, "-c", CODE],
        check=True, capture_output=True, text=True, env=os.environ | variables,
    )  # fmt: skip
    return [int(number) for number in found.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_memory_that_was_freed_is_used_again() -> None:
    kept, first, again = run()
    assert kept == 1
    assert again < 100 < first


def test_what_is_free_goes_back_when_the_process_has_grown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("merakc.runtime.allocator.STATM", tmp_path / "statm")
    trims: list[int] = []
    kept = KeptMemory(SimpleNamespace(malloc_trim=trims.append))
    counts = []
    for pages in (1000, 1010, 1020, 1100, 1110, 900, 910, 920):
        (tmp_path / "statm").write_text(f"5000 {pages} 300 1 0 400 0\n")
        kept.settle()
        counts.append(len(trims))
    assert counts == [0, 0, 1, 1, 1, 1, 1, 2]  # by more than a 64th of the least since
    assert set(trims) == {0}


def test_what_the_user_has_set_stands() -> None:
    kept, _, again = run(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    assert kept == 0
    assert again > 1000


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert keep_freed_memory() is None

"""Files that a forward looks at or writes are refused; those that Python itself needs are not."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import merakc
from merakc.errors import RecordError
from merakc.machines.cluster import NOMINAL_CPU


class Looking(nn.Module):
    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self.look, self.w = look, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        return (x * self.w).sum()


HERE = Path(__file__)
WRITES: dict[str, Callable[[], object]] = {
    "open": lambda: open("x.txt", "a").close(),
    "path": lambda: Path("x.txt").write_text("x"),
    "descriptor": lambda: os.open("x.txt", os.O_WRONLY | os.O_CREAT),
    "save": lambda: np.save("x.txt", np.ones(2)),
}
READS: dict[str, Callable[[], object]] = {
    "open": lambda: open(HERE).read(),  # noqa: SIM115
    "path": HERE.read_bytes,
    "descriptor": lambda: os.open(HERE, os.O_RDONLY),
    "numpy": lambda: np.load("x.npy"),
    "raw": lambda: np.fromfile("x.raw"),
    "torch": lambda: torch.load("x.pt"),
}
ASKS: dict[str, Callable[[], object]] = {
    "exists": HERE.exists,
    "os.path": lambda: os.path.exists("flag"),
    "time": lambda: os.path.getmtime(HERE),
}
FOLDERS: dict[str, Callable[[], object]] = {
    "list": os.listdir,
    "walk": lambda: list(os.walk(".")),
    "glob": lambda: list(Path().glob("*.txt")),
}
RIGHT: dict[str, Callable[[], object]] = {
    "warning": lambda: warnings.warn("look", stacklevel=1),
    "version": lambda: importlib.metadata.version("torch"),
    "import": lambda: __import__("colorsys"),
}


def parallel(look: Callable[[], object]) -> Tensor:
    x = torch.ones(2, 4)
    model = merakc.auto_parallel(Looking(look), {"x": x}, cluster=NOMINAL_CPU)
    found: Tensor = model(x=x)
    return found


@pytest.mark.parametrize(
    ("look", "text"),
    [
        *((look, "writes to a file .*; return what it writes") for look in WRITES.values()),
        *((look, "reads a file .*; do it before auto_parallel") for look in READS.values()),
        *((look, "looks for a file .*; do it before auto_parallel") for look in ASKS.values()),
        *((look, "looks (into a folder|for a file) ") for look in FOLDERS.values()),
        (lambda: subprocess.run(["true"]), "starts a process "),
    ],
    ids=[*(f"writes {n}" for n in WRITES), *(f"reads {n}" for n in READS), *ASKS, *FOLDERS, "run"],
)
def test_files_are_refused(
    look: Callable[[], object], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordError, match=rf"test_files\.py:\d+: the forward {text}"):
        parallel(look)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.filterwarnings("ignore:look")
def test_what_python_looks_for_is_not(name: str) -> None:
    sys.modules.pop("colorsys", None)
    assert parallel(RIGHT[name]) == 8

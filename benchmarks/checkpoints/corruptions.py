"""Checkpoints that are damaged in all ways: none may be loaded."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import merakc
from merakc.errors import CheckpointError
from merakc.train.checkpoints.manifest import NAME


def _flipped(folder: Path, pick: random.Random) -> str:
    path = _any_file(folder, pick)
    data = bytearray(path.read_bytes())
    at, bit = pick.randrange(len(data)), pick.randrange(8)
    data[at] ^= 1 << bit
    if path.name == NAME and _means_the_same(path.read_bytes(), bytes(data)):
        return _flipped(folder, pick)  # a space of the JSON
    path.write_bytes(data)
    return f"bit {bit} of byte {at} of {path.name}"


def _means_the_same(old: bytes, new: bytes) -> bool:
    try:
        return bool(json.loads(old) == json.loads(new))
    except ValueError:
        return False


def _cut(folder: Path, pick: random.Random) -> str:
    path = _any_file(folder, pick)
    data = path.read_bytes()
    keep = pick.randrange(len(data) - 1 if path.name == NAME else len(data))
    path.write_bytes(data[:keep])
    return f"{path.name} cut to {keep} of {len(data)} bytes"


def _longer(folder: Path, pick: random.Random) -> str:
    path = pick.choice([p for p in sorted(folder.iterdir()) if p.name != NAME])
    path.write_bytes(path.read_bytes() + pick.randbytes(pick.randint(1, 64)))
    return f"{path.name} longer"


def _zeros(folder: Path, pick: random.Random) -> str:
    path = _any_file(folder, pick)
    data = bytearray(path.read_bytes())
    start = pick.randrange(len(data))
    stop = min(len(data), start + pick.randint(8, 4096))
    if not any(data[start:stop]):
        return _zeros(folder, pick)
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    return f"bytes {start} to {stop} of {path.name} are zeros"


def _swapped(folder: Path, pick: random.Random) -> str:
    first, second = pick.sample(sorted(folder.iterdir()), 2)
    aside = folder / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return f"{first.name} and {second.name} swapped"


def _missing(folder: Path, pick: random.Random) -> str:
    path = _any_file(folder, pick)
    path.unlink()
    return f"{path.name} missing"


def _stale(folder: Path, pick: random.Random) -> str:
    """A file of the checkpoint before, which is of the same size."""
    older = folder.with_name("older")
    names = [p.name for p in sorted(older.iterdir())]
    name = pick.choice([n for n in names if (older / n).read_bytes() != (folder / n).read_bytes()])
    shutil.copy(older / name, folder / name)
    return f"{name} of an older checkpoint"


def _any_file(folder: Path, pick: random.Random) -> Path:
    return pick.choice(sorted(folder.iterdir()))


WAYS: tuple[Callable[[Path, random.Random], str], ...] = (
    _flipped, _flipped, _flipped, _cut, _longer, _zeros, _swapped, _missing, _stale,
)  # fmt: skip


def corrupted(
    good: Path, place: Path, pick: random.Random, model: nn.Module, optimizer: torch.optim.Optimizer
) -> str:
    """Damages a copy of a checkpoint in one way and loads it: what was done and was not seen;
    nothing where it was refused, and the model stayed as it was.
    """
    folder = place / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    done = pick.choice(WAYS)(folder, pick)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        merakc.load(folder, model, optimizer)
    except CheckpointError:
        same = all(map(torch.equal, before, model.parameters()))
        return "" if same else f"{done}: refused, but the model was changed"
    return f"{done}: loaded"

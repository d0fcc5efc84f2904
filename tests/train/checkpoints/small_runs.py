"""A small run on ranks of any layout, to be saved and gone on with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import merakc
from tests.battery.small_models import Words, build, parallel, part, words


def trained(steps: int = 2, **layout: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after some steps, in one process without merakc where no layout is given."""
    model: Any
    model = parallel(partial(Words), words(0), **layout) if layout else build(partial(Words))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        model(**(part(words(step), model) if layout else words(step)))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved(folder: Path, steps: int = 2, extra: Any = None, **layout: Any) -> None:
    """Trains and saves."""
    model, optimizer = trained(steps, **layout)
    merakc.save(folder, model, optimizer, extra=extra)

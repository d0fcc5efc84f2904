"""`merakc.export`: a model's weights for other programs, written by all ranks at once."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from merakc.errors import CheckpointError
from merakc.runtime.groups import together
from merakc.runtime.health.job import call
from merakc.train.checkpoints.run_state import weights_of
from merakc.train.checkpoints.saving import (
    config_of,
    parameter_names,
    place_of_folder,
    saving_group,
    write,
)
from merakc.train.checkpoints.storage import FILE_BYTES, Writer


def export(
    folder: str | Path,
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = FILE_BYTES,
) -> Path:
    """Writes what `from_pretrained` and `auto_parallel(weights=...)` read: the weights in
    safetensors files with their index, `config.json` and `generation_config.json`, and a checksum
    of every byte. Nothing is gathered; every rank must call it.

    Args:
        folder: what is written; a checkpoint that is there is replaced, once all is written.
        model: a parallel model, or any `nn.Module` in one process.
        dtype: of all floating tensors; if None, that in which the model keeps them: in mixed
            precision the masters'.
        max_shard_bytes: of one file.

    Returns the folder. Raises `CheckpointError` on every rank for one that cannot be written.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise CheckpointError(f"dtype={dtype}: weights are cast to floating dtypes alone")
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes={max_shard_bytes}: a file has bytes; give more")
    folder, made = place_of_folder(folder), cache(lambda: weights_of(model))
    with call("merakc.export"):
        together(lambda: bool(made()))
        extras: list[Any] = [{"scheduler": [], "extra": None}]
        run = {"parameters": parameter_names(model), "optimizers": [], "extras": extras}
        floating = (t.dtype for t in made().values() if t.is_floating_point())
        configs = _configs(model, dtype or next(floating, None))
        writer = Writer(folder, run, configs, max_shard_bytes, dtype)
        write(made(), writer, saving_group(), None)
    return folder


def _configs(model: nn.Module, dtype: torch.dtype | None) -> dict[str, str]:
    """The other files that `from_pretrained` reads, of a model of transformers."""
    found = {}
    if config := config_of(model):
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            config = json.dumps({**json.loads(config), "dtype": name}, indent=2) + "\n"
        found["config.json"] = config
    generation = getattr(getattr(model, "_source", model), "generation_config", None)
    if callable(written := getattr(generation, "to_json_string", None)):
        found["generation_config.json"] = written()
    return found

"""Adapters of peft on a parallel model: their files, which are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.nn.utils.stateless import _reparametrize_module

from merakc.errors import ConfigError
from merakc.runtime.groups import from_rank_0
from merakc.train.model import ParallelModel


def save_adapters(folder: str | Path, model: Any, **options: Any) -> None:
    """Writes the adapters alone, as peft's `save_pretrained` with these options does, for
    `PeftModel.from_pretrained`. The weights are gathered on rank 0; every rank must call it.

    Raises `ConfigError` for a model without adapters of peft.
    """
    if not isinstance(model, ParallelModel) or not hasattr(model, "peft_config"):
        raise ConfigError(
            f"save_adapters is given a {type(model).__name__} without adapters of peft; give the "
            "model that auto_parallel made of peft's; merakc.export writes whole models"
        )
    whole = model.full_state_dict()
    source: Any = model._own("_steps").source  # peft's model, as auto_parallel was given it

    def save() -> None:
        with _reparametrize_module(source, whole):  # prompts are read of the model
            source.save_pretrained(str(folder), state_dict=whole, **options)

    from_rank_0(save)

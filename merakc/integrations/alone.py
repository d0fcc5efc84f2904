"""Ranks of a parallel model are to accelerate processes by themselves, of which one writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from merakc.runtime.groups import together
from merakc.train.checkpoints.exporting import export
from merakc.train.checkpoints.manifest import NAME


def stand_alone(rank: int, device: torch.device) -> None:
    """Tells accelerate that this process is one of its own: what ranks do together, the model does.

    Rank 0 alone writes files and logs.
    """
    state = PartialState(cpu=device.type == "cpu")
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    state.process_index = rank
    state.local_process_index = int(os.environ.get("LOCAL_RANK", rank))
    state.device = device  # and not "cpu:1"
    AcceleratorState._reset_state()


def read_everything(accelerator: Any) -> None:
    """Lets every rank read all batches: rank 0 hands none on, as accelerate has it do with streams,
    and other ranks would wait for.
    """
    accelerator.dataloader_config.dispatch_batches = False


def put_into(
    folder: Path, write: Callable[[Path], Any], *, main: bool, leave_out: str = ""
) -> None:
    """Puts the files of a folder, which all ranks write, to those that are in `folder`; the `main`
    rank moves them, but for the one to `leave_out`, which then is not in `folder` either.
    """
    aside = folder.absolute().with_name(f".{folder.name}.written")
    write(aside)
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        for path in aside.iterdir():
            os.replace(path, folder / path.name)
        if leave_out:
            (folder / leave_out).unlink(missing_ok=True)
        aside.rmdir()
    together(lambda: True)


def put_weights(folder: Path, model: Any, *, main: bool) -> None:
    """Puts the files that `from_pretrained` reads into `folder`, without the checksums of a
    checkpoint: other programs write to such a folder, and would make them untrue.
    """
    put_into(folder, lambda aside: export(aside, model), main=main, leave_out=NAME)

"""What ranks write together reaches a folder whole, beside what is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from merakc.equality.ranks import run_ranks
from merakc.integrations.alone import put_into, put_weights, stand_alone

pytestmark = pytest.mark.filterwarnings("ignore")


def write(folder: Path) -> tuple[int, bool, str]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}  # as torchrun does
    rank = torch.distributed.get_rank()
    stand_alone(rank, torch.device("cpu"))

    def files(aside: Path) -> None:
        aside.mkdir(exist_ok=True)
        (aside / f"of_{rank}").write_text("new")
        torch.distributed.barrier()

    put_into(folder, files, main=rank == 0)
    state = PartialState()
    return state.num_processes, state.is_main_process, (folder / "of_1").read_text()


def test_ranks_are_alone_and_write_together(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "there").write_text("before")
    (folder / "of_1").write_text("old")
    assert run_ranks(2, write, folder) == [(1, True, "new"), (1, False, "new")]
    assert sorted(p.name for p in folder.iterdir()) == ["of_0", "of_1", "there"]
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    AcceleratorState._reset_state(True)


def test_weights_for_others_have_no_checksums(tmp_path: Path) -> None:
    """Another program that writes there would make them untrue; so would these weights."""
    (tmp_path / "checkpoint.json").write_text("of a checkpoint that was there")
    put_weights(tmp_path, torch.nn.Linear(2, 2), main=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]

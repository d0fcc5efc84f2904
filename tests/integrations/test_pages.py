"""The scripts of the pages on other frameworks train on two ranks as in one process.

That `torchrun` starts one of them, `test_accelerate.py` shows.
"""

from __future__ import annotations

import io
import os
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import lightning.pytorch  # noqa: F401  # once, and not in every rank
import pytest
import torch
import torch.distributed as dist
import trl.trainer.sft_trainer  # noqa: F401
from accelerate.state import AcceleratorState

from merakc.equality.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, on a CPU
ROOT = Path(__file__).parents[2]
LOGGED = r"'loss': '([\d.]+)'"


@pytest.fixture(autouse=True)
def alone() -> None:
    AcceleratorState._reset_state(True)  # which ranks would find


def printed(folder: Path) -> str:
    """What a script prints in a process that torchrun, or nobody, has made one of several."""
    os.chdir(folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2", "HF_HUB_OFFLINE": "1"}
    if dist.get_world_size() == 1:
        dist.destroy_process_group()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            del os.environ[name]
    torch.manual_seed(0)
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path("train.py", run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize(
    ("page", "told", "count"),
    [("trainer", LOGGED, 4), ("lightning", r"loss ([\d.]+)", 8), ("trl", LOGGED, 4)],
    ids=["trainer", "lightning", "trl"],
)
def test_a_pages_script_trains_alike_on_two_ranks(
    page: str, told: str, count: int, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    (tmp_path / "train.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    one, two = (
        [float(x) for x in re.findall(told, "".join(run_ranks(ranks, printed, tmp_path)))]
        for ranks in (1, 2)
    )
    assert len(one) == count
    assert two == pytest.approx(one, abs=2e-3)  # and logged once
    assert page != "trl" or (tmp_path / "out" / "model.safetensors").exists()

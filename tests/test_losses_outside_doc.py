"""Both scripts of docs/losses-outside.md run on two ranks, and train alike."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "losses-outside.md").read_text()
FUNCTION, LOOP = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def _losses(folder: Path, script: str) -> list[float]:
    (folder / "train.py").write_text(script)
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "train.py"],
        cwd=folder, env=env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(x) for x in re.findall(r"step \d: loss ([\d.]+)", done.stdout)]


def test_the_scripts_train_alike(tmp_path: Path) -> None:
    losses = _losses(tmp_path, FUNCTION)
    assert len(losses) == 5
    assert _losses(tmp_path, LOOP) == pytest.approx(losses, abs=1e-5)

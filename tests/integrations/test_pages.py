"""The scripts of the pages on other frameworks train on two ranks as in one process."""

from __future__ import annotations

import re
from pathlib import Path

import lightning.pytorch  # noqa: F401  # once, and not in every rank
import pytest
import trl.trainer.sft_trainer  # noqa: F401
from accelerate.state import AcceleratorState

from tests.as_users import printed

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, on a CPU
ROOT = Path(__file__).parents[2]
LOGGED = r"'loss': '([\d.]+)'"


@pytest.fixture(autouse=True)
def alone() -> None:
    AcceleratorState._reset_state(True)  # which ranks would find


@pytest.mark.parametrize(
    ("page", "told", "count"),
    [("trainer", LOGGED, 4), ("lightning", r"loss ([\d.]+)", 8), ("trl", LOGGED, 4)],
    ids=["trainer", "lightning", "trl"],
)
def test_a_pages_script_trains_alike_on_two_ranks(
    page: str, told: str, count: int, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    script = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    one, two = (
        [float(x) for x in re.findall(told, printed(tmp_path, script, ranks))] for ranks in (1, 2)
    )
    assert len(one) == count
    assert two == pytest.approx(one, abs=2e-3)  # and logged once
    assert page != "trl" or (tmp_path / "out" / "model.safetensors").exists()

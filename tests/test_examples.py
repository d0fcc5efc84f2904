"""Every recipe of `examples/` runs on two ranks, learns, and leaves its files."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import nbclient
import nbformat
import pytest
from accelerate.state import AcceleratorState

from merakc.equality.ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
# transformers' own: that numbers on a CPU are pinned for no GPU, and tokens are none.
pytestmark = pytest.mark.filterwarnings("ignore")
LEAVES = {
    "fine_tune": ("--folder=fine-tuned", "fine-tuned/model.safetensors"),
    "lora": ("--folder=adapters", "adapters/adapter_model.safetensors"),
    "contrastive": ("--steps=20", ""),
}


def run(name: str, folder: Path, *words: str) -> str:
    """What a rank prints, and of others than the first what they warn of."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}  # as torchrun does
    os.chdir(folder)
    sys.argv = [f"{name}.py", "--steps=20", *words]
    with (
        contextlib.redirect_stdout(io.StringIO()) as told,
        warnings.catch_warnings(record=True) as w,
    ):
        warnings.simplefilter("always")
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    warned = [str(each.message) for each in w] if os.environ["RANK"] != "0" else []
    return "\n".join([told.getvalue(), *warned]).strip()


def losses_in(told: str) -> list[float]:
    return [float(x) for x in re.findall(r"(?<!_)loss'?:? '?([\d.]+)", told)]


@pytest.mark.parametrize("name", LEAVES)
def test_a_recipe_learns(name: str, tmp_path: Path) -> None:
    option, leaves = LEAVES[name]
    first, second = run_ranks(2, run, name, tmp_path, option)
    losses = losses_in(first)
    assert len(losses) >= 2
    assert losses[1] < losses[0]
    assert not second
    assert (tmp_path / leaves).exists()
    AcceleratorState._reset_state(True)


def test_pretraining_goes_on_with_other_ranks(tmp_path: Path) -> None:
    before, silent = run_ranks(2, run, "pretrain", tmp_path, "--save-every=10", "--steps=10")
    (told,) = run_ranks(1, run, "pretrain", tmp_path, "--save-every=10")
    assert re.findall(r"step (\d+)", before + told) == ["10", "20"]
    assert losses_in(told)[0] < losses_in(before)[0]
    assert not silent


def test_all_recipes_are_named_in_the_readme() -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*LEAVES, "pretrain"} == set(re.findall(r"\(examples/(\w+)\.py\)", readme))


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    told = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", ()))
    first, last = map(float, re.findall(r"loss ([\d.]+) to ([\d.]+)", told)[0])
    assert last < first
    assert "of the words are guessed" in told

"""Every command and code block of the README runs."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from merakc.planner.sources.source import PRESETS
from tests.as_users import losses, printed, told

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for b in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
            for line in b.splitlines()]  # fmt: skip
(SCRIPT, FIXED_DEGREES, SHARDED, OVERLAPPED, OFFLOADED, MIXED, FROM_FILES, DIMS, SAVE, LOAD,
 WITH_PLAN) = PYTHON_BLOCKS  # fmt: skip
CALL = "model = merakc.auto_parallel(model, example, batch_size=8)  # the one line"


# The same with fewer layers and steps, for what each other call of the page does to it.
SMALL = SCRIPT.replace("num_hidden_layers=4", "num_hidden_layers=2").replace(
    "range(10)", "range(3)"
)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder, and the losses of the smaller script in it, run by one process."""
    folder = tmp_path_factory.mktemp("readme")
    plain = losses(printed(folder, SMALL))
    assert len(plain) == 3
    return folder, plain


def torchrun(folder: Path, script: str, ranks: int) -> list[float]:
    (folder / "train.py").write_text(script)
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "train.py"],
        cwd=folder, env=env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(done.stdout)


def test_the_script_learns(tmp_path: Path) -> None:
    plain = losses(printed(tmp_path, SCRIPT))
    assert len(plain) == 10
    assert plain[-1] < plain[0] - 0.5


def test_the_script_starts_from_files(one_process: tuple[Path, list[float]]) -> None:
    folder, plain = one_process
    before = (
        'model.save_pretrained("folder")\n'
        'with torch.device("meta"):\n    model = LlamaForCausalLM(config)\n'
    )
    assert losses(printed(folder, SMALL.replace(CALL, before + FROM_FILES))) == plain


@pytest.mark.parametrize(
    ("call", "ranks", "atol"),
    [
        (FIXED_DEGREES, 4, 2e-3),
        (SHARDED, 4, 2e-3),
        (OVERLAPPED, 2, 2e-3),
        (OFFLOADED, 2, 0.1),
        (MIXED, 2, 0.1),
    ],
    ids=["fixed degrees", "sharded state", "overlap", "offload", "mixed precision"],
)
def test_the_script_trains_alike_with(
    call: str, ranks: int, atol: float, one_process: tuple[Path, list[float]]
) -> None:
    folder, plain = one_process
    found = losses(printed(folder, SMALL.replace(CALL, call.strip()), ranks))
    assert found == pytest.approx(plain, abs=atol)


def test_the_script_trains_alike_with_dims_of_samples_and_with_the_plan_that_it_saves(
    one_process: tuple[Path, list[float]],
) -> None:
    folder, plain = one_process
    found = losses(printed(folder, SMALL.replace(CALL, DIMS.strip()), 2))
    assert found == pytest.approx(plain, abs=2e-3)
    parallel = losses(printed(folder, SMALL, 2))
    again = losses(printed(folder, SMALL.replace(CALL, WITH_PLAN.strip()), 2))
    assert again == parallel


def test_torchrun_runs_the_script_with_chosen_degrees_and_one_process_resumes(
    one_process: tuple[Path, list[float]],
) -> None:
    folder, plain = one_process
    assert "torchrun --nproc-per-node 4 train.py" in COMMANDS
    before, loop = SMALL.split("for step,")
    then = "loss = model(**example).loss.item()\nif not model.rank: print('step 3: loss', loss)\n"
    first = torchrun(folder, before + "for step," + loop + SAVE + then, 2)
    assert first[:3] == pytest.approx(plain, abs=2e-3)
    resumed = losses(printed(folder, before + LOAD + then))
    assert resumed == pytest.approx(first[3:], abs=1e-5)


def test_the_command_line_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer layers than the preset has, which `test_commands_doc.py` plans for as it is."""
    small = {**PRESETS["llama-3-8b"], "num_hidden_layers": 4}
    monkeypatch.setitem(PRESETS, "llama-3-8b", small)
    lines = [line for line in COMMANDS if line.startswith("merakc ")]
    assert [line.split()[1] for line in lines] == ["plan", "plan", "show", "show", "diff"]
    for line in lines:
        told(tmp_path, line, status=line.startswith("merakc diff"))
    assert {p.name for p in tmp_path.iterdir()} == {
        "a.json", "b.json", "a.html", "a.trace.json", "a.png",
    }  # fmt: skip


def test_the_make_commands_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in COMMANDS:
        if command.startswith("make "):
            assert command.removeprefix("make ") in targets


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")
def test_the_benchmarks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, *words: str) -> str:
        """What `python -m benchmarks.NAME` prints."""
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        return capsys.readouterr().out

    names = re.findall(r"^python -m benchmarks\.(.*)$", BENCHMARKS, re.MULTILINE)
    assert names == [
        "equivalence layouts",
        "zoo",
        "equivalence schedules",
        "equivalence state",
        "state_sharding",
        "compile_time",
    ]
    for name in names:
        assert "--json" in run(*name.split(), "--help")
    small = ("--models", "gpt2", "--layouts", "1,1,2", "--json", str(tmp_path / "cells.json"))
    assert "passed" in run(*names[0].split(), *small)


def test_the_linked_documents_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    for target in re.findall(r"\]\(([^)#]+)\)", BENCHMARKS):
        assert (ROOT / "docs" / target).exists(), target


def test_the_benchmarks_that_are_listed_are_there() -> None:
    for cell in re.findall(r"^\| (`.*?`) \|", BENCHMARKS, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", cell):
            assert find_spec(f"benchmarks.{name}"), name

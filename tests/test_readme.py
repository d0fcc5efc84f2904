"""Every command and code block of the README runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for b in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
            for line in b.splitlines()]  # fmt: skip
(SCRIPT, FIXED_DEGREES, SHARDED, OVERLAPPED, MIXED, FROM_FILES, DIMS, SAVE, LOAD,
 WITH_PLAN) = PYTHON_BLOCKS  # fmt: skip
CALL = "model = merakc.auto_parallel(model, example)  # the one line"


def _run(folder: Path, *command: str) -> str:
    """What a command prints, in an environment as a user's shell has it."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", printed)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The README's script, run by `python train.py`."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "train.py").write_text(SCRIPT)
    return folder, _losses(_run(folder, sys.executable, "train.py"))


def _torchrun(folder: Path, script: str, ranks: int) -> list[float]:
    (folder / "parallel.py").write_text(script)
    return _losses(
        _run(folder, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node",
             str(ranks), "parallel.py")
    )  # fmt: skip


def test_the_script_learns(one_process: tuple[Path, list[float]]) -> None:
    _, losses = one_process
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.5


def test_the_script_starts_from_files(one_process: tuple[Path, list[float]]) -> None:
    folder, losses = one_process
    before = (
        'model.save_pretrained("folder")\n'
        'with torch.device("meta"):\n    model = LlamaForCausalLM(config)\n'
    )
    (folder / "files.py").write_text(SCRIPT.replace(CALL, before + FROM_FILES))
    assert _losses(_run(folder, sys.executable, "files.py")) == losses


def test_the_script_trains_alike_on_four_ranks_with_fixed_degrees(
    one_process: tuple[Path, list[float]],
) -> None:
    folder, losses = one_process
    assert "torchrun --nproc-per-node 4 train.py" in COMMANDS
    parallel = _torchrun(folder, SCRIPT.replace(CALL, FIXED_DEGREES.strip()), 4)
    assert parallel == pytest.approx(losses, abs=2e-3)
    again = _torchrun(folder, SCRIPT.replace(CALL, WITH_PLAN.strip()), 4)
    assert again == parallel


def test_the_script_trains_alike_with_sharded_state(
    one_process: tuple[Path, list[float]],
) -> None:
    folder, losses = one_process
    sharded = _torchrun(folder, SCRIPT.replace(CALL, SHARDED.strip()), 4)
    assert sharded == pytest.approx(losses, abs=2e-3)


def test_the_script_trains_alike_with_communication_under_computation(
    one_process: tuple[Path, list[float]],
) -> None:
    folder, losses = one_process
    overlapped = _torchrun(folder, SCRIPT.replace(CALL, OVERLAPPED.strip()), 2)
    assert overlapped == pytest.approx(losses, abs=2e-3)


def test_the_script_trains_in_mixed_precision(one_process: tuple[Path, list[float]]) -> None:
    folder, losses = one_process
    mixed = _torchrun(folder, SCRIPT.replace(CALL, MIXED.strip()), 2)
    assert mixed == pytest.approx(losses, abs=0.1)


def test_the_script_runs_on_two_ranks_with_chosen_degrees_and_resumes(
    one_process: tuple[Path, list[float]],
) -> None:
    folder, losses = one_process
    before, loop = SCRIPT.split("for step,")
    told = "loss = model(**example).loss.item()\nif not model.rank: print('step 10: loss', loss)\n"
    saved = before + "for step," + loop + SAVE + told
    first = _torchrun(folder, saved, 2)
    assert first[:10] == pytest.approx(losses, abs=2e-3)
    (folder / "resumed.py").write_text(before + LOAD + told)
    resumed = _losses(_run(folder, sys.executable, "resumed.py"))
    assert resumed == pytest.approx(first[10:], abs=1e-5)


def test_the_command_line_works(tmp_path: Path) -> None:
    lines = [c.split()[1:] for c in COMMANDS if c.startswith("merakc ")]
    assert [words[0] for words in lines] == ["plan", "plan", "show", "show", "diff"]
    for words in lines:
        command = [sys.executable, "-c", "from merakc.cli.app import app; app()", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == (words[0] == "diff"), done.stdout + done.stderr


def test_the_make_commands_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in COMMANDS:
        if command.startswith("make "):
            assert command.removeprefix("make ") in targets


def test_the_benchmarks_start(tmp_path: Path) -> None:
    names = [c.split()[2:] for c in COMMANDS if c.startswith("python -m benchmarks.")]
    assert names == [
        f"benchmarks.{name}".split()
        for name in (
            "equivalence layouts",
            "zoo",
            "equivalence schedules",
            "equivalence state",
            "state_sharding",
            "compile_time",
        )
    ]
    for name in names:
        assert "--json" in _run(ROOT, sys.executable, "-m", *name, "--help")
    small = ("--models", "gpt2", "--layouts", "1,1,2", "--json", str(tmp_path / "cells.json"))
    assert "passed" in _run(ROOT, sys.executable, "-m", *names[0], *small)


def test_the_linked_documents_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_samples_may_be_said_to_stand_where_they_do(
    one_process: tuple[Path, list[float]],
) -> None:
    folder, losses = one_process
    said = _torchrun(folder, SCRIPT.replace(CALL, DIMS.strip()), 2)
    assert said == pytest.approx(losses, abs=2e-3)

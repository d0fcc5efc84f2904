"""What docs/checkpoints.md says runs: the job that goes on by itself, and the commands."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

from tests.as_users import printed, told

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "checkpoints.md").read_text()
_, START, SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^merakc checkpoint .*$", PAGE, re.MULTILINE)
# A rank alone waits for another, and two in a step behind a save for the end of one.
WAIT = """    while not os.path.exists("killed") and (os.environ["WORLD_SIZE"] == "1" or step > 14):
        __import__("time").sleep(0.05)"""
LINE = re.compile(r"step (\d+) on (\d) ranks: loss ([\d.]+)")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _machine(folder: Path, port: int, number: int, log: Path) -> subprocess.Popen[bytes]:
    """What one of two machines runs: torchrun with one rank. They meet at the first, which waits
    for the other: a machine that waits looks about once a second whether it may join.
    """
    meeting = f"last_call_timeout=4,is_host={not number},read_timeout=240"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
        "--max-restarts", "10", "--rdzv-backend", "c10d", "--rdzv-id", "job",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", meeting, "train.py",
    ]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as file:
        return subprocess.Popen(
            command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def _kill(machine: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(machine.pid).children(recursive=True)
    for process in (machine.pid, *(p.pid for p in family)):
        os.kill(process, signal.SIGKILL)
    machine.wait()


def _losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, _, loss in LINE.findall(text)}


@pytest.mark.timeout(600)
def test_a_job_goes_on_with_the_machine_that_is_left(tmp_path: Path) -> None:
    script = SCRIPT.replace("    loss.backward()", f"{WAIT}\n    loss.backward()")
    (tmp_path / "train.py").write_text(script)
    port, logs = _free_port(), [tmp_path / f"{k}.log" for k in range(2)]
    machines = [_machine(tmp_path, port, k, log) for k, log in enumerate(logs)]
    try:
        deadline_s = time.monotonic() + 240
        while not (tmp_path / "runs" / "step-10").exists():
            assert time.monotonic() < deadline_s, [log.read_text()[-3000:] for log in logs]
            time.sleep(0.05)
        _kill(machines[1])
        (tmp_path / "killed").touch()
        assert machines[0].wait(240) == 0, logs[0].read_text()[-3000:]
    finally:
        for machine in machines:
            if machine.poll() is None:
                _kill(machine)
    text = logs[0].read_text()
    counts = [int(ranks) for _, ranks, _ in LINE.findall(text + logs[1].read_text())]
    assert set(counts) == {1, 2}
    (tmp_path / "alone").mkdir()
    alone = printed(tmp_path / "alone", SCRIPT)
    found, wanted = _losses(text + logs[1].read_text()), _losses(alone)
    assert found.keys() == wanted.keys()
    assert list(found.values()) == pytest.approx([wanted[k] for k in found], abs=2e-4)
    _commands(tmp_path / "alone")


def test_every_rank_of_the_job_has_a_part_of_the_batch() -> None:
    """On as many machines as the command allows; tensors are cut into fewer chunks, else."""
    whole = int(re.findall(r"WHOLE_BATCH, STEPS = (\d+)", SCRIPT)[0])
    few, many, of_each = map(
        int, re.findall(r"--nnodes (\d+):(\d+) --nproc-per-node (\d+)", PAGE)[0]
    )
    for machines in range(few, many + 1):
        ranks = machines * of_each
        assert [len(x) for x in torch.ones(whole).chunk(ranks)] == [whole // ranks] * ranks


def test_a_model_starts_from_files(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    printed(tmp_path, START)
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    base, tuned = read(tmp_path / "base"), read(tmp_path / "tuned", dtype="auto")
    assert tuned.dtype == torch.bfloat16
    for name, value in tuned.state_dict().items():
        moved = not torch.equal(value, base.state_dict()[name].bfloat16())
        assert moved or value.dim() < 2, name  # a step is less than the last bit of a 1
        torch.testing.assert_close(value.float(), base.state_dict()[name], rtol=0.02, atol=2e-3)


def _commands(folder: Path) -> None:
    """The page's commands, on what the script has saved."""
    assert len(COMMANDS) == 6
    for command in COMMANDS:
        told(folder, command.replace("step-10", "step-40"))

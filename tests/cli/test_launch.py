"""`merakc launch` starts ranks as torchrun does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from merakc.cli.launch import ranks_of_machine, settings, torchrun
from merakc.errors import ConfigError
from merakc.ir.plan_file import PlanFile
from tests.ir.test_plan import PLAN

COMMAND = [sys.executable, "-c", "from merakc.cli.app import app; app()", "launch"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_a_script_runs_on_all_ranks_with_its_own_arguments(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text(
        "import os, sys\n"
        "said = os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:]\n"
        "os.write(1, (' '.join(said) + '\\n').encode())\n"  # at once: both write to one pipe
        "sys.exit(3 if '--fail' in sys.argv else 0)\n"
    )
    done = run("--ranks", "2", str(script), "--lr", "0.1", "--ranks", "--nproc")
    assert done.returncode == 0, done.stderr
    given = "2 --lr 0.1 --ranks --nproc"
    assert sorted(done.stdout.split("\n"))[1:] == [f"0 {given}", f"1 {given}"]
    assert "torchrun --standalone --nproc-per-node 2 " in done.stderr
    failed = run("--ranks", "1", str(script), "--fail")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[1:] == ["merakc: all ranks have ended (rank 0: exit code 3)"]
    missing = run(str(tmp_path / "none.py"))
    assert missing.returncode == 2
    assert "no such script" in missing.stderr


@pytest.mark.parametrize(
    ("started", "told"),
    [
        ("pass", "merakc: interrupted: all ranks have ended"),
        ("show_errors_short()", "interrupted: all ranks end"),
    ],
)
def test_an_interruption_is_one_line(started: str, told: str, tmp_path: Path) -> None:
    """Also before ranks have come to merakc, which they import a while."""
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, time\n"
        "from merakc.machines.excepthook import show_errors_short\n"
        f"{started}\n"
        "os.write(1, b'here\\n')\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [*COMMAND, "--ranks", "2", str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert [process.stdout.readline() for _ in range(2)] == ["here\n"] * 2
        process.send_signal(signal.SIGINT)
        since_s = time.monotonic()
        assert process.stdout.read() == ""  # once the last rank has closed it
        assert time.monotonic() - since_s < 10  # 0.5 s with nothing beside it
        assert process.stderr.read().splitlines()[1:] == [told]
    assert process.returncode == 128 + signal.SIGINT


def test_several_machines_meet_at_an_address() -> None:
    assert torchrun(8, "1:4", "first:29400", 10) == [
        "--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "first:29400",
        "--nproc-per-node", "8", "--max-restarts", "10",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--rendezvous"):
        torchrun(8, "2", None, 0)
    for nodes in ("0", "x", "2:1", "1:x", ""):
        with pytest.raises(ConfigError, match="give a number of machines"):
            torchrun(8, nodes, "first:29400", 0)
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        torchrun(8, "2", "first", 0)


def test_what_is_set_stays() -> None:
    given = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONHASHSEED": "7"}
    assert settings(10**6, given, alone=True) == {"OMP_NUM_THREADS": "1"}
    assert settings(2, {"OMP_NUM_THREADS": "5"}, alone=False) == {"PYTHONHASHSEED": "0"}


def test_a_plan_says_how_many_ranks(tmp_path: Path) -> None:
    PlanFile(PLAN).save(path := tmp_path / "plan.json")
    ranks = PLAN.mesh.world_size
    assert ranks_of_machine(None, path, "1") == ranks
    with pytest.raises(
        ConfigError, match=f"is of {ranks} ranks, which --nodes .* leave --ranks out"
    ):
        ranks_of_machine(ranks + 1, path, "1")
    with pytest.raises(ConfigError, match="one of machines"):
        ranks_of_machine(None, path, "1:4")
    assert ranks_of_machine(3, None, "1:4") == 3

"""What a terminal shows of an error that ends a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import merakc
from merakc.errors import ForwardError
from merakc.machines.excepthook import WHOLE, shortened, show_errors_short

SCRIPT = """
import atexit, gc, os, signal, sys, time
first = gc.get_freeze_count()  # Python 3.12 starts with some
import torch
import merakc

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return {"loss": self.layer(x).mean()}

class Held:
    def __del__(self):
        os.write(1, b"taken apart ")

sys.modules["held"] = Held()
over = lambda: "over garbage" if gc.get_freeze_count() > first else ""
atexit.register(lambda: print("said goodbye", over()))
given = {"tp": 3} if sys.argv[1] == "refused" else {}
model = merakc.auto_parallel(Words(), {"x": torch.ones(2, 4)}, **given)
signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored behind a shell's `&`
os.kill(os.getpid(), signal.SIGINT)
time.sleep(20)
"""


@pytest.mark.parametrize(
    ("kind", "lines", "last", "said", "code"),
    [
        ("refused", 5, "merakc.errors.ConfigError: ", "said goodbye \ntaken apart ", 1),
        ("stopped", 1, "interrupted: all ranks end", "said goodbye over garbage\n", -signal.SIGINT),
    ],
)
def test_errors_that_end_a_program_are_short(
    kind: str, lines: int, last: str, said: str, code: int, tmp_path: Path
) -> None:
    """And of one that is interrupted nothing is taken apart, which takes long."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "train.py", kind], cwd=tmp_path, text=True, check=False,
        capture_output=True, timeout=120, env=os.environ | {"MERAKC_QUIET": "1"},
    )  # fmt: skip
    found = done.stderr.strip().splitlines()
    assert (done.returncode, done.stdout) == (code, said)
    assert len(found) <= lines, found
    assert found[-1].startswith(last), found


def raised() -> ForwardError:
    try:
        try:
            raise ValueError("no such x")
        except ValueError as cause:
            raise ForwardError("the forward failed") from cause
    except ForwardError as error:
        return error


def test_causes_stay_and_lines_of_merakc_go() -> None:
    text = shortened(raised())
    assert text.splitlines()[-1] == "merakc.errors.ForwardError: the forward failed"
    assert "ValueError: no such x" in text
    assert "in raised" in text
    with pytest.raises(merakc.MerakError) as caught:
        merakc.load_plan("/nothing")
    assert "merakc/" not in shortened(caught.value)


def test_other_errors_and_whole_traces_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    show_errors_short.cache_clear()
    show_errors_short()
    errors = [RuntimeError("another"), raised()]
    sys.excepthook(RuntimeError, errors[0], None)
    monkeypatch.setenv(WHOLE, "1")
    sys.excepthook(ForwardError, errors[1], None)
    assert seen == errors

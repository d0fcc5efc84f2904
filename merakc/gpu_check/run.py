"""Runs checks in processes of their own: those that are timed one by one, behind all others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from merakc.gpu_check.checks import Check, Found

LOOK_S = 0.1
# A process holds a context and the caches of a small model: so many share a GPU.
MOST_AT_ONCE = 12


class _Running:
    """A check at work."""

    def __init__(self, check: Check, folder: Path) -> None:
        self.check, self.folder = check, folder
        self.start_s = time.monotonic()
        self.log = (folder / "log").open("w", encoding="utf-8")
        call = [sys.executable, "-m", "merakc.gpu_check.checks", json.dumps(asdict(check))]
        self.process = subprocess.Popen(
            [*call, str(folder / "found")], stdout=self.log, stderr=subprocess.STDOUT,
            start_new_session=True, env={"OMP_NUM_THREADS": "1", **os.environ},
        )  # fmt: skip

    def ended(self) -> Found | None:
        """How it ended; None while it runs, and not for longer than it may."""
        took_s = time.monotonic() - self.start_s
        code = self.process.poll()
        if code is None and took_s <= self.check.limit_s:
            return None
        self.stop()
        if (path := self.folder / "found").exists():
            return Found(**json.loads(path.read_text(encoding="utf-8")))
        last = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        how = f"exit code {code}" if code is not None else f"no end after {took_s:.0f} s"
        told = {"log": last[-6000:]}
        return Found(
            self.check.room, self.check.name, ok=False, text=how, seconds=took_s, figures=told
        )

    def stop(self) -> None:
        """Ends it and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def run_all(checks: Sequence[Check], at_once: int | None = None) -> Iterator[Found]:
    """How each ends, as they do."""
    cores = len(os.sched_getaffinity(0))
    at_once = at_once or max(min(cores - 2, MOST_AT_ONCE), 1)
    left = [check for check in checks if check.room != "speed"]
    timed = [check for check in checks if check.room == "speed"]
    running: list[_Running] = []
    with tempfile.TemporaryDirectory(prefix="merakc-gpu-check-") as place:
        try:
            while left or timed or running:
                if (left or timed) and len(running) < (at_once if left else 1):
                    folder = Path(tempfile.mkdtemp(dir=place))
                    running.append(_Running((left or timed).pop(0), folder))
                    continue
                time.sleep(LOOK_S)
                for one in [*running]:
                    if (found := one.ended()) is not None:
                        running.remove(one)
                        yield found
        finally:
            for one in running:
                one.stop()

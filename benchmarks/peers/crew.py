"""The ranks of one contestant, as processes that stay and are told what to do."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.peers.networks import Network
from benchmarks.peers.training import Training

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0
SHOWN_LINES = 200  # of what a rank that failed has written: its error, and what that came from


class CrewError(RuntimeError):
    """A rank that ended, or did not answer in time, with the end of what it has written."""


class Crew:
    """Starts the ranks of a peer on a network; `ask` gives every rank's answer to a command.

    `python` is the interpreter that has the peer. Raises `CrewError` where a rank fails.
    """

    def __init__(
        self,
        peer: str,
        form: str,
        training: Training,
        network: Network,
        *,
        python: Path | None = None,
        environment: Mapping[str, str] | None = None,
        probe: bool = False,
    ) -> None:
        self.name = f"{peer} {form}"
        self.folder = tempfile.TemporaryDirectory(prefix="merakc-crew-")
        self.ranks: list[subprocess.Popen[str]] = []
        variables = os.environ | {
            "WORLD_SIZE": str(training.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",  # unused: the ranks meet over a file
            "GLOO_SOCKET_IFNAME": network.interface,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": str(ROOT),
            **(environment or {}),
        }
        for rank in range(training.ranks):
            given = {
                "peer": peer,
                "form": form,
                "sizes": dataclasses.asdict(training),
                "rank": rank,
                "store": f"{self.folder.name}/store",
                "probe": probe,
            }
            command = [str(python or sys.executable), "-m", "benchmarks.peers.worker"]
            with self._log(rank).open("w") as log:
                self.ranks.append(
                    subprocess.Popen(
                        [*network.enter(rank), *command, json.dumps(given)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        cwd=ROOT,
                    )
                )

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """The answers of all ranks to a command of `benchmarks.peers.worker.Rank`."""
        for process in self.ranks:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([command, arguments]) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                break  # `answers` says why
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """One answer of every rank; the first is to having started."""
        deadline_s = time.monotonic() + TIMEOUT_S
        found: list[dict[str, Any]] = [{} for _ in self.ranks]
        waiting: dict[IO[str], int] = {}
        for rank, process in enumerate(self.ranks):
            assert process.stdout is not None
            waiting[process.stdout] = rank
        while waiting:
            ready, _, _ = select.select(
                list(waiting), [], [], max(0.0, deadline_s - time.monotonic())
            )
            if not ready:
                raise CrewError(self._complaint(min(waiting.values()), "gives no answer"))
            for pipe in ready:
                rank = waiting.pop(pipe)
                line = pipe.readline()
                if not line:
                    raise CrewError(self._complaint(rank, "ended"))
                found[rank] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the ranks."""
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.communicate()
        self.folder.cleanup()

    def _log(self, rank: int) -> Path:
        return Path(self.folder.name) / f"{rank}.log"

    def _complaint(self, rank: int, what: str) -> str:
        lines: Sequence[str] = self._log(rank).read_text(errors="replace").splitlines()
        return "\n".join([f"rank {rank} of {self.name} {what}:", *lines[-SHOWN_LINES:]])

"""What has been measured, in a file that grows table by table, so that a stopped run can go on."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer
from pydantic import TypeAdapter

from benchmarks.peers.plans import training_of
from benchmarks.peers.results import Result, complaints, summary
from benchmarks.peers.training import Training


@dataclass
class Store:
    """The file of a comparison, if it has one; `settings` are what its tables were measured by."""

    path: Path | None
    settings: Mapping[str, int | str]
    before_s: float = 0.0  # of runs that were stopped
    start_s: float = field(default_factory=time.perf_counter)

    @property
    def wall_s(self) -> float:
        """Seconds of all runs so far."""
        return self.before_s + time.perf_counter() - self.start_s

    def keep(self, results: Sequence[Result], notes: Sequence[str] = ()) -> None:
        """Writes all that has been measured."""
        if self.path is None:
            return
        wrong = complaints(results)
        body = {"passed": not wrong, "wall_s": self.wall_s, **self.settings, "notes": notes,
                "wrong": wrong, "best_peer_to_merakc": summary(results),
                "results": [dataclasses.asdict(result) for result in results]}  # fmt: skip
        self.path.write_text(json.dumps(body, indent=1) + "\n")

    def tables(self, base: Training) -> tuple[Result, ...]:
        """What a run that was stopped has left.

        Raises `typer.BadParameter` where there is none, or it was another comparison.
        """
        if self.path is None or not self.path.exists():
            raise typer.BadParameter(
                f"--resume goes on with the file of --json; there is none: {self.path}"
            )
        body = json.loads(self.path.read_text())
        found = TypeAdapter(tuple[Result, ...]).validate_python(body["results"])
        alike = all(result.training == training_of(result.plan, base) for result in found)
        if not alike or self.settings != {name: body[name] for name in self.settings}:
            raise typer.BadParameter(
                f"{self.path} holds tables of another comparison; give the options that it was "
                "made with, or leave --resume away"
            )
        self.before_s = body["wall_s"]
        return found

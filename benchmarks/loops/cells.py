"""A program on a layout, beside itself in one process."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate.state import AcceleratorState

from benchmarks.loops.job import Job, on
from merakc.equality.casts import lifted_casts
from merakc.equality.ranks import RankError, run_ranks
from merakc.errors import MerakError
from merakc.train.model import ParallelModel

# By the name of a loop: its program, and whether it trains adapters.
LOOPS = {
    "plain loop": ("plain_loop", False),
    "loss outside": ("outside_loss", False),
    "Trainer": ("trainer", False),
    "Trainer + LoRA": ("trainer", True),
    "Accelerate": ("accelerate_loop", False),
    "Lightning": ("lightning_loop", False),
    "TRL SFT": ("trl_sft", False),
    "TRL SFT + LoRA": ("trl_sft", True),
    "TRL DPO": ("trl_dpo", False),
    "TRL DPO + LoRA": ("trl_dpo", True),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "tp": 1, "pp": 1, "state_shards": "zero-0"},
    "tp2": {"dp": 1, "tp": 2, "pp": 1},
    "pp2": {"dp": 1, "tp": 1, "pp": 2},
    "dp2 zero-1": {"dp": 2, "tp": 1, "pp": 1, "state_shards": "zero-1"},
    "tp2 pp2": {"dp": 1, "tp": 2, "pp": 2},
}
# Of float64 throughout; trainers of transformers and TRL sum and hand on in float32 what they tell.
BOUND, CAST_BOUND = 1e-10, 1e-5
EPSILON = torch.finfo(torch.float32).eps
CAST = {"trainer", "trl_sft", "trl_dpo"}
MARK = re.compile(r"( *)(.*?)  # merakc(?:: (.*))?$")
TIMEOUT_S = 600.0
Tensors = dict[str, torch.Tensor]
Told = list[dict[str, float]]


def program(loop: str) -> ModuleType:
    """The module of a loop."""
    return importlib.import_module(f"benchmarks.loops.programs.{LOOPS[loop][0]}")


def changed_lines(loop: str) -> list[str]:
    """The lines of a program that one for one process has not."""
    found = map(MARK.match, inspect.getsource(program(loop)).splitlines())
    return [match[2] for match in found if match]


def in_one_process(loop: str) -> Callable[[Job], torch.nn.Module]:
    """The program without merakc: its marked lines are left out, or are others."""
    lines = inspect.getsource(program(loop)).splitlines()
    kept = []
    for line in lines:
        match = MARK.match(line)
        if match is None:
            kept.append(line)
        elif match[3]:
            kept.append(match[1] + match[3])
    names: dict[str, Any] = {"__name__": f"plain {loop}"}
    exec(compile(ast.parse("\n".join(kept)), f"<{loop} in one process>", "exec"), names)
    run: Callable[[Job], torch.nn.Module] = names["run"]
    return run


def trained(run: Callable[[Job], torch.nn.Module], job: Job) -> tuple[Told, Tensors]:
    """What a program has told, and the weights that it leaves, on the first rank."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": ranks, "CI": "1"}
    with lifted_casts(), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        model = run(job)
        whole = isinstance(model, ParallelModel)
        weights = model.full_state_dict() if whole else dict(model.state_dict())
    return job.told, {name: value.detach().clone() for name, value in weights.items()}


@dataclass
class Cell:
    """A loop on one layout, and from its middle on another."""

    loop: str
    layout: str
    then: str
    error: float = 0.0  # the largest, relative, of weights; of what is told by its own bound
    problem: str = ""
    refused: str = ""

    @property
    def passed(self) -> bool:
        """Whether it was compared, and is equal."""
        return not self.problem and not self.refused

    @property
    def said(self) -> str:
        """How it went, in a few words."""
        if self.refused:
            return f"REFUSED {self.refused}"
        if self.problem:
            return f"DIFFERS {self.problem}"
        return f"equal, weights within {self.error:.0e}"


def references(loop: str, steps: int, folder: Path) -> tuple[Told, Tensors]:
    """The loop in one process."""
    job = Job(folder, {}, steps, 0, steps, LOOPS[loop][1])
    try:
        return trained(in_one_process(loop), job)
    finally:
        AcceleratorState._reset_state(True)


def compared(loop: str, layout: str, steps: int, plain: tuple[Told, Tensors]) -> Cell:
    """Trains half of the steps on `layout`, the others on the next one, and compares."""
    names = [*LAYOUTS]
    cell = Cell(loop, layout, names[(names.index(layout) + 1) % len(names)])
    run, told, ranks = program(loop).run, Told(), list[tuple[Told, Tensors]]()
    with tempfile.TemporaryDirectory() as folder:
        for name, first, last in ((layout, 0, steps // 2), (cell.then, steps // 2, steps)):
            degrees = LAYOUTS[name]
            world = degrees["dp"] * degrees["tp"] * degrees["pp"]
            job = Job(Path(folder), on(degrees), steps, first, last, LOOPS[loop][1])
            try:
                ranks = run_ranks(world, trained, run, job, timeout_s=TIMEOUT_S)
            except RankError as error:
                where = f"on {name}: "
                if isinstance(error.__cause__, MerakError):
                    cell.refused = f"{where}{error.__cause__}"
                else:
                    cell.problem = f"{where}{error.details.strip().splitlines()[-1]}"
                return cell
            if any(other != ranks[0][0] for other, _ in ranks):
                cell.problem = f"on {name}: ranks tell other numbers"
                return cell
            told += ranks[0][0]
    _compare(cell, told, ranks[0][1], plain)
    return cell


def _compare(cell: Cell, told: Told, weights: Tensors, plain: tuple[Told, Tensors]) -> None:
    """Notes the largest difference, and where it is more than may be."""
    theirs, whole = plain
    if [t.keys() for t in told] != [t.keys() for t in theirs] or weights.keys() != whole.keys():
        cell.problem = f"tells {told}, and in one process {theirs}"
        return
    bound = CAST_BOUND if LOOPS[cell.loop][0] in CAST else BOUND
    for ours, other in zip(told, theirs, strict=True):
        # Margins are differences: of numbers that were rounded, they are as far off as these.
        rounding = EPSILON * max(map(abs, other.values())) if bound == CAST_BOUND else 0.0
        for name, value in other.items():
            if not math.isclose(ours[name], value, rel_tol=bound, abs_tol=rounding):
                cell.problem = f"{name} is {ours[name]} after step {other['step']}, not {value}"
                return
    cell.error = max(_difference(weights[name], value) for name, value in whole.items())
    if not cell.error <= BOUND:
        cell.problem = f"weights differ by {cell.error:.1e}"


def _difference(ours: torch.Tensor, plain: torch.Tensor) -> float:
    largest = plain.abs().max().item() or 1.0
    return (ours - plain).abs().max().item() / largest

"""What the ranks of a trial do: train a small model, until one of them does something else."""

from __future__ import annotations

import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import merakc
from merakc.equality.ranks import run_ranks
from merakc.train.model import ParallelModel

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "pp2": {"pp": 2, "dp": 1, "tp": 1},
    "tp2": {"tp": 2, "dp": 1, "pp": 1},
    "dp2 zero-1": {"dp": 2, "tp": 1, "pp": 1, "state_shards": "zero-1"},
    "tp2 x pp2": {"tp": 2, "pp": 2, "dp": 1},
}
SAMPLES, WIDTH, CLASSES = 8, 16, 4
# Far more than a trial runs: what is to end it does.
STEPS, LEGAL_STEPS = 100_000, 20
# What a rank may still allocate where its memory is short, and asks for in pieces.
ROOM_BYTES, PIECE_BYTES = 16 << 20, 1 << 20


class Small(nn.Module):
    """Two residual blocks and a head, that every layout can split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        """The logits, and the loss where there are labels."""
        x = x + self.down(nn.functional.gelu(self.up(x)))
        x = x + self.back(nn.functional.gelu(self.wide(x)))
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def batch(samples: int = SAMPLES) -> dict[str, torch.Tensor]:
    """A batch, the same on every rank."""
    pick = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(samples, WIDTH, generator=pick),
        "labels": torch.randint(CLASSES, (samples,), generator=pick),
    }


@dataclass(frozen=True)
class Kind:
    """A fault. `deviate` is what the victim does in place of its step, if it does it itself;
    `signal` what it is sent, if it is.
    """

    name: str
    deviate: Callable[[Run], None] | None = None
    signal: str = ""
    early: bool = False  # while the model is being made
    legal: bool = False  # nothing is wrong, and all ranks end well
    victim: int | None = None  # which rank it is, if not any
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    waits: bool = False  # nothing is lost, and the others may wait for it as long as they may
    first_step: int = 0  # before which it would be no fault


@dataclass
class Run:
    """A rank's run: its model, its optimizer, its batch."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    batch: dict[str, torch.Tensor]
    timeout_s: float

    def step(self) -> None:
        """A step of training, as users write it."""
        self.optimizer.zero_grad()
        self.model(**self.batch)["loss"].backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()


def _raise(_: Run) -> None:
    raise ValueError("a mistake of the user's own")


def _starve(run: Run) -> None:
    """Takes its memory away, as a container's limit would, and goes on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    held = []
    while True:
        held.append(torch.ones(PIECE_BYTES // 4))
        run.step()


def _sleep(run: Run) -> None:
    time.sleep(run.timeout_s + 4)


def _batch(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Any:
    def deviate(run: Run) -> None:
        run.batch = change(run.batch)

    return deviate


def _eval(run: Run) -> None:
    run.model.eval()


def _no_grad(run: Run) -> None:
    with torch.no_grad():
        run.model(**run.batch)


def _save(run: Run) -> None:
    with tempfile.TemporaryDirectory(prefix="merakc-faults-") as folder:
        merakc.save(f"{folder}/checkpoint", run.model, run.optimizer)


ALONE: Mapping[str, Callable[[Run], None]] = {
    "full_state_dict": lambda run: (run.model.full_state_dict(), None)[1],
    "full_gradients": lambda run: (run.model.full_gradients(), None)[1],
    "predict": lambda run: (run.model.predict(**run.batch), None)[1],
    "clip": lambda run: (run.model.clip_grad_norm_(1.0), None)[1],
    "save": _save,
}
REPLICATED = ("pp2", "tp2", "tp2 x pp2")
KINDS = (
    Kind("SIGKILL", signal="SIGKILL"),
    Kind("SIGKILL while planning", signal="SIGKILL", early=True),
    Kind("SIGTERM", signal="SIGTERM"),
    Kind("SIGSTOP", signal="SIGSTOP", waits=True),
    Kind("exception of the user's", _raise),
    Kind("sys.exit", lambda run: sys.exit(0)),
    Kind("a rank that does not come", _sleep, waits=True),
    Kind("memory limit", _starve),
    Kind("another batch size", _batch(lambda b: batch(SAMPLES - 2)), layouts=REPLICATED),
    # In the first call that is no fault: ranks lend what others have not, and settle then whether.
    Kind("no labels", _batch(lambda b: {"x": b["x"]}), first_step=1),
    Kind("features of another width", _batch(lambda b: b | {"x": b["x"][:, :-1]})),
    Kind("eval()", _eval),
    Kind("no_grad", _no_grad),
    *(Kind(f"{name} on rank 0 alone", call, victim=0) for name, call in ALONE.items()),
    Kind("uneven batches", _batch(lambda b: batch(SAMPLES - 2)), legal=True,
         layouts=("dp2 zero-1",)),
)  # fmt: skip


def plan_of(layout: str) -> str:
    """A plan for a layout, as text, so that trials need not look for one."""

    def made() -> str:
        with tempfile.TemporaryDirectory(prefix="merakc-faults-") as folder:
            model = merakc.auto_parallel(Small(), batch(), **LAYOUTS[layout])
            model.plan_file.save(f"{folder}/plan{dist.get_rank()}.json")
            return Path(f"{folder}/plan{dist.get_rank()}.json").read_text()

    degrees = LAYOUTS[layout]
    return run_ranks(degrees["dp"] * degrees["tp"] * degrees["pp"], made)[0]


def work(
    kind: Kind, victim: int, at_step: int, plan: Path, timeout_s: float, say: Callable[..., None]
) -> None:
    """The life of one rank; `say` tells whoever watches what happens."""
    torch.manual_seed(0)
    say("begin")
    model = merakc.auto_parallel(Small(), batch(), plan=plan, timeout_s=timeout_s)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    run = Run(model, optimizer, batch(), timeout_s)
    deviates = dist.get_rank() == victim and kind.deviate is not None
    say("ready")
    for k in range(LEGAL_STEPS + at_step if kind.legal else STEPS):
        if k == at_step and deviates:
            say("deviates")
            assert kind.deviate is not None
            kind.deviate(run)
        run.step()
    dist.barrier()  # or the first to end would leave the others' last messages behind
    say("done")


def pick_victim(kind: Kind, layout: str, pick: random.Random) -> int:
    """The rank that a trial's fault is of."""
    degrees = LAYOUTS[layout]
    ranks = degrees["dp"] * degrees["tp"] * degrees["pp"]
    return pick.randrange(ranks) if kind.victim is None else kind.victim

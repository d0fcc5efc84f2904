"""Runs that are killed at random moments of training and saving, and go on."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import psutil
import torch

import merakc
from benchmarks.checkpoints.runs import Layout, Run, Tensors
from benchmarks.ranks import RankError, RankTimeoutError, run_ranks
from merakc.ir.program import Mesh

MODEL, STEPS = "llama", 8
BEGUN = "begun"  # a file that says that a run trains
POLL_S = 0.002
LAYOUTS = (
    Layout(Mesh(1, 2, 1)), Layout(Mesh(1, 1, 2)), Layout(Mesh(2, 1, 1), "zero-1"),
    Layout(Mesh(2, 1, 1), "zero-3", "bf16-mixed"),
)  # fmt: skip


@cache
def undisturbed(layout: Layout) -> Tensors:
    """The weights of a run that was never killed."""
    found: Tensors = run_ranks(2, partial(_whole, layout))[0]
    return found


def _goes_on(layout: Layout, folder: Path, wait: bool) -> None:
    """The whole life of a run: from the newest good checkpoint to the end."""
    with suppress(RankError, RankTimeoutError):
        run_ranks(2, partial(_train, layout, folder, wait=wait))


def _whole(layout: Layout) -> Tensors:
    return Run(MODEL, layout).steps(STEPS)[1]


def _train(layout: Layout, folder: Path, *, wait: bool) -> Tensors:
    """Goes on from the newest good checkpoint to the end; saves after each step, keeps two."""
    run = Run(MODEL, layout)
    if (newest := merakc.latest(folder)) is not None:
        run.load(newest)
    (folder / BEGUN).touch()

    def save(run: Run) -> None:
        saved = run.save(folder / f"step-{run.next}", keep_last=2, wait=wait)
        if run.next == STEPS:
            saved.wait()

    return run.steps(STEPS, save)[1]


def seconds_of_training(layout: Layout) -> float:
    """How long a run trains and saves that nobody kills."""
    folder = Path(tempfile.mkdtemp(prefix="merakc-kill-"))
    run_ranks(2, partial(_train, layout, folder, wait=True))
    found_s = time.time() - (folder / BEGUN).stat().st_mtime
    shutil.rmtree(folder)
    return found_s


def killed(layout: Layout, pick: random.Random, within_s: float) -> tuple[str, int]:
    """One run that is killed once, at a random moment of `within_s` seconds from its first step on,
    one rank or all, and goes on: what is wrong with it, if anything is, and after which step it
    went on.
    """
    folder = Path(tempfile.mkdtemp(prefix="merakc-kill-"))
    try:
        wait = pick.random() < 0.5
        process = multiprocessing.get_context("fork").Process(
            target=_goes_on, args=(layout, folder, wait)
        )
        process.start()
        while process.is_alive() and not (folder / BEGUN).exists():
            time.sleep(POLL_S)
        process.join(pick.random() * within_s)
        with suppress(psutil.NoSuchProcess):
            ranks = psutil.Process(process.pid).children()
            for rank in ranks if pick.random() < 0.5 else ranks[-1:]:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
        process.join()
        newest = merakc.latest(folder)
        step = int(newest.name.removeprefix("step-")) if newest else 0
        weights = run_ranks(2, partial(_train, layout, folder, wait=True))[0]
        wanted = undisturbed(layout)
        unlike = [n for n in wanted if not torch.equal(weights[n], wanted[n])]
        left = [p.name for p in folder.iterdir() if p.name.startswith(".")]
        if unlike:
            return f"after a kill at step {step}, '{unlike[0]}' is another", step
        return (f"{left[0]} is left" if left else ""), step
    except (RankError, RankTimeoutError) as error:
        return f"failed: {str(error).strip().splitlines()[-1]}", -1
    finally:
        shutil.rmtree(folder)

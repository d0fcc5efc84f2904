"""Runs that move through random plans: their state bit by bit, and the steps after each move."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.checkpoints.runs import CASES, PRECISIONS, Layout, Run, Tensors, random_layout
from benchmarks.ranks import RankError, RankTimeoutError, run_ranks
from merakc.errors import RecordError
from merakc.train.checkpoints.convert import read_contents

SAVED, LAST = 2, 5  # steps
MOVES = 5  # of a walk, of which the last leads back
REFUSED = "refused"
# What BatchNorm counts and averages, on a rank of dp, of the micro-batches that it sees.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# Of losses; the second where a model casts to float32 inside. AdamW divides gradients by their
# size, so that rounding of those that are almost nothing shows in weights: they may differ more.
DOUBLE, CAST, ENLARGED = 1e-10, 1e-5, 100
Steps = tuple[list[float], Tensors]  # losses, and on rank 0 the weights after them


@dataclass(frozen=True)
class Walk:
    """A run of a model that moves from layout to layout, and back to the first."""

    model: str
    layouts: tuple[Layout, ...]

    @property
    def name(self) -> str:
        """What it is, in a line."""
        return f"{self.model} {self.layouts[0].precision}: {' > '.join(map(str, self.layouts))}"


def random_walks(count: int, seed: int, most_ranks: int) -> list[Walk]:
    """Walks of so many moves together at least, through all models and precisions in turn."""
    pick = random.Random(seed)
    ranks = tuple(n for n in (1, 2, 3, 4) if n <= most_ranks)
    walks = []
    for k in range(-(-count // MOVES)):
        precision = PRECISIONS[k // len(CASES) % len(PRECISIONS)]
        layouts = tuple(random_layout(pick, precision, ranks) for _ in range(MOVES))
        walks.append(Walk(list(CASES)[k % len(CASES)], (*layouts, layouts[0])))
    return walks


def problems(walk: Walk) -> list[str]:
    """What is wrong with each move of a walk, up to the first that fails; "" where nothing is,
    `REFUSED` where a plan is.

    A move saves under one plan and loads under the next. What is loaded, saved again, is the same
    in files bit by bit. The steps after it are those of a run that came to the layout directly, bit
    by bit, and of one that was never interrupted: bit by bit where the walk is back, in float64 to
    rounding on other layouts. (In mixed precision sums of other orders differ in what was rounded.)
    """
    place = Path(tempfile.mkdtemp(prefix="merakc-reshard-"))
    found: list[str] = []
    first = walk.layouts[0]
    try:
        undisturbed = _ranks(first, _begun, walk.model, first, place / "0")
        for k, layout in enumerate(walk.layouts[1:], start=1):
            start, end = place / str(k - 1), place / str(k)
            moved = _ranks(layout, _moved, walk.model, layout, start, end, place / "0")
            found.append(_problem(walk, k, place, moved, undisturbed))
    except (RankError, RankTimeoutError) as error:
        if isinstance(error.__cause__, RecordError):  # T5 looks at all of a batch in float16
            return [*found, REFUSED]
        return [*found, f"failed: {str(error).strip().splitlines()[-1]}"]
    finally:
        shutil.rmtree(place)
    return found


def _ranks(layout: Layout, *call: object) -> tuple[Steps, ...]:
    """What rank 0 returns."""
    found: tuple[Steps, ...] = run_ranks(layout.mesh.world_size, partial(*call))[0]  # type: ignore[arg-type]
    return found


def _begun(name: str, layout: Layout, end: Path) -> tuple[Steps, ...]:
    """The steps after a save, of a run that goes on."""
    run = Run(name, layout)
    run.steps(SAVED)
    run.save(end)
    return (run.steps(LAST),)


def _moved(name: str, layout: Layout, start: Path, end: Path, first: Path) -> tuple[Steps, ...]:
    """The steps after a checkpoint, which is saved again, and after the run's `first` one."""
    run = Run(name, layout)
    run.load(start)
    run.save(end)
    ways = [run.steps(LAST)]
    run.load(first)
    return (*ways, run.steps(LAST))


def _problem(
    walk: Walk, k: int, place: Path, moved: Iterable[Steps], undisturbed: Iterable[Steps]
) -> str:
    old, new = (read_contents(place / name).tensors for name in ("0", str(k)))
    unlike = [n for n in old if n not in new or not torch.equal(old[n], new[n])]
    if unlike or old.keys() != new.keys():
        return f"{unlike[0] if unlike else 'a tensor'} is another after move {k}"
    (ours, direct), (wanted,) = moved, undisturbed
    if told := _unlike(ours, direct, None):
        return f"by a detour, {told}"
    if k == len(walk.layouts) - 1:
        return _unlike(ours, wanted, None)
    if walk.layouts[0].precision is None:
        return _unlike(ours, wanted, CAST if CASES[walk.model].casts_float32 else DOUBLE)
    return ""


def _unlike(found: Steps, wanted: Steps, bound: float | None) -> str:
    """What differs, of losses and weights; bit by bit without a bound.

    Running statistics are those of dp rank 0's batches: other ones where dp is another.
    """
    ours, theirs = torch.tensor(found[0]), torch.tensor(wanted[0])
    if bound is None and not torch.equal(ours, theirs):
        return f"the losses are {found[0]}, not {wanted[0]}"
    if bound is not None and not torch.allclose(ours, theirs, rtol=bound, atol=bound):
        return f"the losses are {found[0]}, not {wanted[0]}"
    for name, value in wanted[1].items():
        own = found[1][name]
        if bound is None and not torch.equal(own, value):
            return f"'{name}' is another"
        if bound is not None and not name.endswith(STATISTICS):
            error = (own.double() - value.double()).abs().max().item() if value.numel() else 0.0
            if error > ENLARGED * bound * max(1.0, value.double().abs().max().item()):
                return f"'{name}' differs by {error:.1e}"
    return ""

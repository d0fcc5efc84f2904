"""A run that moves from one random plan to another: its state bit by bit, and the steps after."""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.checkpoints.runs import (
    CASES,
    PRECISIONS,
    Layout,
    Tensors,
    moved,
    random_layout,
    trained,
)
from benchmarks.ranks import RankError, RankTimeoutError, run_ranks
from merakc.errors import RecordError
from merakc.train.checkpoints.convert import read_contents

SAVED, LAST = 2, 5  # steps
REFUSED = "refused"
# What BatchNorm counts and averages, on a rank of dp, of the micro-batches that it sees.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# Of losses; the second where a model casts to float32 inside. AdamW divides gradients by their
# size, so that rounding of those that are almost nothing shows in weights: they may differ more.
DOUBLE, CAST, ENLARGED = 1e-10, 1e-5, 100


@dataclass(frozen=True)
class Reshard:
    """One trial: where the run began, through which layout it went, and where it goes on."""

    model: str
    first: Layout
    between: Layout
    last: Layout

    @property
    def name(self) -> str:
        """What it is, in a line."""
        return f"{self.model} {self.first.precision}: {self.first} > {self.between} > {self.last}"


def random_reshards(count: int, seed: int, most_ranks: int) -> list[Reshard]:
    """Trials that go through all models and precisions in turn."""
    pick, found = random.Random(seed), []
    ranks = tuple(n for n in (1, 2, 3, 4) if n <= most_ranks)
    for k in range(count):
        model = list(CASES)[k % len(CASES)]
        precision = PRECISIONS[k // len(CASES) % len(PRECISIONS)]
        first, between, last = (random_layout(pick, precision, ranks) for _ in range(3))
        found.append(Reshard(model, first, between, last))
    return found


def problem(trial: Reshard) -> str:
    """What is wrong with a trial; nothing if nothing is, `REFUSED` where such a plan is.

    The state that is moved from layout to layout is to be the same bit by bit, in files. The steps
    after it are compared with a run that was never interrupted: bit by bit on the layout that it
    began with, in float64 to rounding on another. In mixed precision, where sums of other orders
    differ in what was rounded, a run on the last layout that came there by another way is to be
    the same bit by bit.
    """
    place = Path(tempfile.mkdtemp(prefix="merakc-reshard-"))
    try:
        return _problem(trial, place)
    except (RankError, RankTimeoutError) as error:
        if isinstance(error.__cause__, RecordError):  # T5 looks at all of a batch in float16
            return REFUSED
        return f"failed: {str(error).strip().splitlines()[-1]}"
    finally:
        shutil.rmtree(place)


def _problem(trial: Reshard, place: Path) -> str:
    def run(layout: Layout, *args: object, **options: object) -> tuple[list[float], Tensors]:
        call = partial(trained, trial.model, layout, *args, **options)
        return run_ranks(layout.mesh.world_size, call)[0]  # type: ignore[no-any-return]

    def move(layout: Layout, start: Path, end: Path) -> None:
        run_ranks(layout.mesh.world_size, partial(moved, trial.model, layout, start, end))

    first, last = trial.first, trial.last
    run(first, 0, SAVED, end=place / "first")
    move(trial.between, place / "first", place / "between")
    move(last, place / "between", place / "last")
    old, new = read_contents(place / "first").tensors, read_contents(place / "last").tensors
    unlike = [n for n in old if n not in new or not torch.equal(old[n], new[n])]
    if unlike or old.keys() != new.keys():
        return f"{unlike[0] if unlike else 'a tensor'} is another after it was moved"
    undisturbed = run(first, 0, LAST)
    again = run(first, 0, LAST, start=place / "last")
    if found := _unlike(again, undisturbed, None):
        return f"on the layout that it began with, {found}"
    other = run(last, 0, LAST, start=place / "first")
    if first.precision is None:
        return _unlike(other, undisturbed, CAST if CASES[trial.model].casts_float32 else DOUBLE)
    return _unlike(run(last, 0, LAST, start=place / "last"), other, None)


def _unlike(
    found: tuple[list[float], Tensors], wanted: tuple[list[float], Tensors], bound: float | None
) -> str:
    """What differs, of losses and weights; bit by bit without a bound.

    Running statistics are those of dp rank 0's batches: other ones where dp is another.
    """
    count = len(found[0])
    ours, theirs = torch.tensor(found[0]), torch.tensor(wanted[0][-count:])
    if bound is None and not torch.equal(ours, theirs):
        return f"the losses are {found[0]}, not {wanted[0][-count:]}"
    if bound is not None and not torch.allclose(ours, theirs, rtol=bound, atol=bound):
        return f"the losses are {found[0]}, not {wanted[0][-count:]}"
    for name, value in wanted[1].items():
        own = found[1][name]
        if bound is None and not torch.equal(own, value):
            return f"'{name}' is another"
        if bound is not None and not name.endswith(STATISTICS):
            error = (own.double() - value.double()).abs().max().item() if value.numel() else 0.0
            if error > ENLARGED * bound * max(1.0, value.double().abs().max().item()):
                return f"'{name}' differs by {error:.1e}"
    return ""

"""`python -m benchmarks.checkpoints`: reshards, kills and corruptions, and what saving takes.

Exits with 1 where a run went on otherwise than it should, a damaged checkpoint was loaded, or
torch's own was faster.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track

import merakc
from benchmarks.checkpoints import corruptions, kills, reshards, speed
from benchmarks.checkpoints.runs import CASES, one_thread, warm
from benchmarks.harness import rich_table

console = Console(highlight=False, markup=False)


def _reshards(count: int, seed: int, ranks: int) -> tuple[int, list[str]]:
    """How many moves there were, `count` or a few more, and what was wrong with which."""
    moves, found, refused = 0, [], 0
    walks = reshards.random_walks(2 * count, seed, ranks)  # as some are refused
    for walk in track(walks, "reshards, at most", console=console):
        if moves >= count:
            break
        told = reshards.problems(walk)
        refused += told.count(reshards.REFUSED)
        moves += len(told) - told.count(reshards.REFUSED)
        for wrong in told:
            if wrong not in ("", reshards.REFUSED):
                found.append(f"{walk.name}: {wrong}")
                console.print(found[-1])
    console.print(f"{refused} walks were refused, in float16")
    return moves, found


def _kills(count: int, seed: int) -> tuple[int, list[str]]:
    pick, found, steps = random.Random(seed), [], Counter[int]()
    within_s = {layout: kills.seconds_of_training(layout) for layout in kills.LAYOUTS}
    for k in track(range(count), "kills", console=console):
        layout = kills.LAYOUTS[k % len(kills.LAYOUTS)]
        wrong, step = kills.killed(layout, pick, within_s[layout])
        steps[step] += 1
        if wrong:
            found.append(f"{layout} {layout.precision}: {wrong}")
            console.print(found[-1])
    told = ", ".join(f"{n} after step {step}" for step, n in sorted(steps.items()))
    console.print(f"runs went on: {told}")
    return count, found


def _corruptions(count: int, seed: int) -> tuple[int, list[str]]:
    pick, found = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="merakc-corrupt-") as text:
        place = Path(text)
        model = CASES["gpt2"].model()
        optimizer = torch.optim.AdamW(model.parameters())
        for name in ("older", "good"):
            model(**CASES["gpt2"].batch(2))["loss"].backward()
            optimizer.step()
            merakc.save(place / name, model, optimizer, extra={"name": name})
        for _ in track(range(count), "corruptions", console=console):
            if wrong := corruptions.corrupted(place / "good", place, pick, model, optimizer):
                found.append(wrong)
                console.print(wrong)
        merakc.load(place / "good", model, optimizer)
    return count, found


def _speed(repeats: int) -> tuple[int, list[str]]:
    """How many layouts were timed, and which promises were broken in which."""
    wrong = []
    rows = [["layout", "", "seconds", "memory beyond the shard's"]]
    for name, (shard_bytes, found) in speed.figures(repeats).items():
        wrong += [f"{name}: {told}" for told in speed.problems(shard_bytes, found)]
        for key, (seconds, peak) in found.items():
            rows.append([name, key, f"{seconds:.3f}", f"{peak / shard_bytes:.0%}"])
    console.print(rich_table(rows, left=2, title="100 million parameters, with AdamW's state"))
    for told in wrong:
        console.print(told)
    return len(speed.LAYOUTS), wrong


def main(
    reshard: Annotated[int, typer.Option("--reshards", min=0)] = 400,
    kill: Annotated[int, typer.Option("--kills", min=0)] = 200,
    corrupt: Annotated[int, typer.Option("--corruptions", min=0)] = 1200,
    repeats: Annotated[int, typer.Option(help="Of what is timed; 0: nothing is.", min=0)] = 5,
    ranks: Annotated[int, typer.Option(help="The most of a layout.", min=1, max=4)] = 4,
    seed: int = 0,
) -> None:
    """Count what goes wrong of each kind; nothing may."""
    one_thread()
    start_s = time.perf_counter()
    warm()
    kinds: Iterable[tuple[str, int, Callable[[], tuple[int, list[str]]]]] = (
        ("reshards", reshard, lambda: _reshards(reshard, seed, ranks)),
        ("kills", kill, lambda: _kills(kill, seed)),
        ("corruptions", corrupt, lambda: _corruptions(corrupt, seed)),
        ("layouts timed", repeats, lambda: _speed(repeats)),
    )
    wrong = {name: run() for name, count, run in kinds if count}
    for name, (count, found) in wrong.items():
        console.print(f"{name}: {count - len(found)} of {count} right")
    console.print(f"in {time.perf_counter() - start_s:.0f} s")
    raise typer.Exit(int(any(found for _, found in wrong.values())))


if __name__ == "__main__":
    typer.run(main)

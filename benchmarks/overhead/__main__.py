"""`python -m benchmarks.overhead`: our step beside eager PyTorch's and `torch.compile`'s.

On one rank and one thread, in one run, in turns: a model of 100 small layers, where a step is
mostly calls, and larger ones, where it is mostly kernels. Then how the step grows with the layers
and the micro-batches, how the CPU time of a pipeline grows with its ranks, and what the first step
of a fresh process takes, planning included. No dropout: merakc draws its numbers in another way.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console

from benchmarks.harness import DocPath, JsonPath, finish, markdown
from benchmarks.overhead.runs import Crowd, Duel, First, crowd, duel, first, median_first
from benchmarks.overlap_steps import Size
from benchmarks.reports import told_run

# What is asked for (docs): of the small layers' step, of larger ones', seconds of a first step.
SMALL_RATIO, LARGE_RATIO = 0.9, 1.0
FIRST_S, CACHED_S = 4.0, 2.5
WATCHED_RATIO = 1.01  # of a step that looks for what is not finite: within the noise
# In float32; gradients of a deep model differ by so much with the order of a sum.
MAX_ERROR = 1e-4
SMALL = Size(layers=100, hidden=64, sequence=64, samples=2)
LARGER = (
    Size(layers=8, hidden=256, sequence=128, samples=8),
    Size(layers=4, hidden=512, sequence=128, samples=8),
)
MODELS = ("gpt2", "llama")
LAYERS = (4, 12, 25, 50, 100, 200, 400)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
RANKS = (1, 2, 4, 8, 16)
CROWD_LAYERS, CROWD_MICRO_BATCHES = 32, 16
COLOURS = {"eager": "#D55E00", "merakc": "#0072B2"}


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    layers: Sequence[int] = LAYERS
    micro_batches: Sequence[int] = MICRO_BATCHES
    ranks: Sequence[int] = RANKS
    small: Size = SMALL
    larger: Sequence[Size] = LARGER
    compiled: Sequence[Size] = (SMALL,)
    rounds: int = 7
    firsts: int = 3


QUICK = Extent(
    layers=(4, 25),
    micro_batches=(1, 8),
    ranks=(1, 2),
    small=Size(25, 64, 64, 2),
    larger=LARGER[:1],
    compiled=(Size(4, 64, 64, 2),),
    rounds=3,
    firsts=1,
)


@dataclass(frozen=True, slots=True)
class Found:
    """All figures."""

    eager: list[Duel]
    compiled: list[Duel]
    watched: list[Duel]
    layers: list[Duel]
    micro_batches: list[Duel]
    crowds: list[Crowd]
    firsts: list[First]

    @property
    def duels(self) -> list[Duel]:
        """Every comparison."""
        return [*self.eager, *self.compiled, *self.watched, *self.layers, *self.micro_batches]


def measure(extent: Extent, advance: Callable[[str], None]) -> Found:
    """Everything; `advance` hears of every part that begins."""

    def told(model: str, size: Size, **options: Any) -> Duel:
        what = ", ".join(f"{k}={v}" for k, v in options.items())
        advance(f"{model}, {size.layers} layers of {size.hidden}, {what}")
        return duel(model, size, rounds=extent.rounds, **options)

    sizes = (extent.small, *extent.larger)
    eager = [told(model, size) for size in sizes for model in MODELS]
    layers = [told("gpt2", dataclasses.replace(SMALL, layers=n)) for n in extent.layers]
    micro_batches = [
        told("gpt2", Size(12, 64, 64, samples=m), micro_batches=m) for m in extent.micro_batches
    ]
    crowds = []
    for ranks in extent.ranks:
        advance(f"{ranks} ranks")
        size = Size(CROWD_LAYERS, 64, 64, samples=CROWD_MICRO_BATCHES)
        crowds.append(crowd(size, ranks, CROWD_MICRO_BATCHES, extent.rounds))
    advance("first steps")
    firsts = first_steps(extent)
    compiled = [
        told(model, size, rival="torch.compile") for size in extent.compiled for model in MODELS
    ]
    watched = [told("gpt2", size, rival="unwatched") for size in sizes]
    return Found(eager, compiled, watched, layers, micro_batches, crowds, firsts)


def first_steps(extent: Extent) -> list[First]:
    """Without and with a plan of another run."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        first("gpt2", extent.small, plan)  # which writes it
        return [
            median_first([first("gpt2", extent.small, given) for _ in range(extent.firsts)])
            for given in (None, plan)
        ]


def complaints(found: Found) -> list[str]:
    """What is not as it is asked for."""
    lines = []
    for one in found.duels:
        if not one.error <= MAX_ERROR:
            lines.append(f"{name_of(one)}: gradients differ by {one.error:.1e}")
    for one in found.eager:
        limit = SMALL_RATIO if one.size.hidden == SMALL.hidden else LARGE_RATIO
        if one.ratio > limit:
            lines.append(f"{name_of(one)}: {one.ratio:.2f} of eager's step, at most {limit:g}")
    lines += [
        f"{name_of(one)}: {one.ratio:.2f} of torch.compile's step, at most 1"
        for one in found.compiled
        if one.ratio > 1
    ]
    lines += [
        f"{name_of(one)}: {one.ratio:.3f} of a step that looks for nothing, at most {WATCHED_RATIO}"
        for one in found.watched
        if one.ratio > WATCHED_RATIO
    ]
    for one in found.firsts:
        limit = CACHED_S if one.cached else FIRST_S
        if one.latency_s > limit:
            plan = "with a plan" if one.cached else "without a plan"
            lines.append(f"first step {plan}: {one.latency_s:.1f} s, at most {limit:g}")
    return lines


def name_of(one: Duel) -> str:
    """What was measured."""
    return f"{one.model}, {one.size.layers} layers of {one.size.hidden}"


def duels_table(duels: Sequence[Duel], theirs: str) -> str:
    """Steps on both sides."""
    heads = ("model", "tokens", theirs, "merakc", "ratio", "least to most", "gradients differ by")
    body = [
        [
            name_of(one),
            str(one.size.samples * one.size.sequence),
            f"{1e3 * statistics.median(one.theirs_s):.1f} ms",
            f"{1e3 * statistics.median(one.ours_s):.1f} ms",
            f"{one.ratio:.2f}",
            f"{min(one.ratios):.2f} to {max(one.ratios):.2f}",
            f"{one.error:.0e}",
        ]
        for one in duels
    ]
    return markdown([heads, *body], left=1)


def growth_table(duels: Sequence[Duel], count: str, number: Callable[[Duel], int]) -> str:
    """Steps over a count, and what one more costs."""
    heads = (count, "eager", "merakc", "ratio", "eager, each", "merakc, each")
    body = []
    for one in duels:
        sides = [statistics.median(s) * 1e3 for s in (one.theirs_s, one.ours_s)]
        each = [f"{side / number(one):.3f} ms" for side in sides]
        times = [f"{side:.1f} ms" for side in sides]
        body.append([str(number(one)), *times, f"{one.ratio:.2f}", *each])
    return markdown([heads, *body], left=1)


def crowds_table(crowds: Sequence[Crowd]) -> str:
    """The CPU time of pipelines over that of one rank."""
    body = []
    for one in crowds:
        more_s = one.cpu_s - crowds[0].cpu_s
        more = one.actions - crowds[0].actions
        each = f"{1e6 * more_s / more:.0f} µs" if more else "–"
        body.append([str(one.ranks), str(one.actions), f"{one.cpu_s * 1e3:.0f} ms", each])
    heads = ("ranks", "actions of all", "CPU of all", "each action more")
    return markdown([heads, *body], left=1)


def firsts_table(firsts: Sequence[First]) -> str:
    """First steps by phase."""
    body = [
        [
            "with a plan of another run" if one.cached else "nothing known",
            *(f"{s:.2f} s" for s in (one.import_s, one.build_s, one.plan_s, one.step_s)),
            f"{one.latency_s:.2f} s",
        ]
        for one in firsts
    ]
    heads = ("", "imports", "the model", "auto_parallel", "first step", "the last two")
    return markdown([heads, *body], left=1)


PAGE = """# What a step costs beside eager PyTorch

{about}

One rank, one thread, float32, no dropout; a step is forward and backward, from gradients of None,
without the optimizer. Both sides take turns in one process; ratios are medians over {rounds}
rounds, below 1 merakc is faster. Both multiply matrices by what torch calls: oneDNN, which merakc
takes where that is faster, is switched off but for the first steps. Other processes took up to
{others:.0%} of the CPU.

{verdict}

## Beside eager

{eager}

## Beside `torch.compile`

`auto_parallel(..., compile=True)` against `torch.compile(model)`.

{compiled}

## Looking for what is not finite

`on_nonfinite="raise"`, which is the default, against `"ignore"`.

{watched}

## How it grows

![Seconds of a step over layers, micro-batches and ranks](overhead.png)

GPT-2 with layers of 64, {tokens} tokens a step:

{layers}

GPT-2 with 12 layers of 64, micro-batches of one sample of 64 tokens:

{micro_batches}

A pipeline (1F1B) of GPT-2 with {crowd_layers} layers of 64, {crowd_micro_batches} micro-batches.
CPU seconds of all ranks: they do not depend on how few cores the ranks share, and what more ranks
add is what actions, messages and their threads cost.

{crowds}

## The first step

GPT-2, {small_layers} layers of {small_hidden}, in a fresh process.

{firsts}
"""


def document(found: Found, extent: Extent, about: str) -> str:
    """The page of the documentation."""
    lacking = complaints(found)
    verdict = "Missed:\n\n" + "\n".join(f"- {c}" for c in lacking) if lacking else "All is met."
    return PAGE.format(
        about=about,
        rounds=extent.rounds,
        others=max(one.others for one in found.duels),
        verdict=verdict,
        eager=duels_table(found.eager, "eager"),
        compiled=duels_table(found.compiled, "torch.compile"),
        watched=duels_table(found.watched, "ignore"),
        tokens=SMALL.samples * SMALL.sequence,
        layers=growth_table(found.layers, "layers", lambda one: one.size.layers),
        micro_batches=growth_table(
            found.micro_batches, "micro-batches", lambda one: one.micro_batches
        ),
        crowd_layers=CROWD_LAYERS,
        crowd_micro_batches=CROWD_MICRO_BATCHES,
        crowds=crowds_table(found.crowds),
        small_layers=extent.small.layers,
        small_hidden=extent.small.hidden,
        firsts=firsts_table(found.firsts),
    )


def draw(found: Found, path: Path) -> None:
    """The growth as a picture: milliseconds of a step, over layers, micro-batches and ranks."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels: list[tuple[str, list[int], dict[str, list[float]]]] = [
        (name, counts, {"eager": [1e3 * statistics.median(d.theirs_s) for d in duels],
                        "merakc": [1e3 * statistics.median(d.ours_s) for d in duels]})
        for name, counts, duels in (
            ("layers", [d.size.layers for d in found.layers], found.layers),
            ("micro-batches", [d.micro_batches for d in found.micro_batches], found.micro_batches),
        )
    ]  # fmt: skip
    cpu_ms = [1e3 * one.cpu_s for one in found.crowds]
    panels.append(("ranks (CPU of all)", [one.ranks for one in found.crowds], {"merakc": cpu_ms}))
    for k, (name, counts, lines) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), k)
        for label, values in lines.items():
            axes.plot(counts, values, color=COLOURS[label], marker="o", label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel=name, ylabel="ms a step", ylim=(0, None))
        axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main(
    json_path: JsonPath = None,
    doc: DocPath = None,
    quick: Annotated[bool, typer.Option(help="A few sizes, to see that it runs.")] = False,
) -> None:
    """Measures; exits with 1 where something falls short of what is asked for.

    With --doc, overhead.png is drawn beside the page.
    """
    torch.set_num_threads(1)
    console = Console()
    extent = QUICK if quick else Extent()
    same_products = torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
    with same_products, console.status("") as status:
        found = measure(extent, status.update)
    page = document(found, extent, told_run("benchmarks.overhead", sys.argv[1:]))
    console.print(page, markup=False)
    if doc is not None:
        draw(found, doc.with_name("overhead.png"))
    finish(
        console, not complaints(found), "", json_path=json_path, figures=found, doc=doc,
        page=lambda: page,
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)

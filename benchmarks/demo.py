"""`python -m benchmarks.demo`: a Llama trained on four ranks, tp = 2 and pp = 2, in minutes.

A stock transformers model of ten million parameters learns the source of Python's standard library,
byte by byte, in float32. The same data then trains the same weights in one process, and the two
loss curves must agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import transformers
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from torch import nn

import merakc
from benchmarks.corpus import VOCABULARY, library_bytes, sample
from benchmarks.harness import bar, rich_table
from benchmarks.memory import peak_live_bytes
from benchmarks.ranks import run_ranks
from benchmarks.reference import split_batch
from merakc.ir.plan_file import PlanFile
from merakc.ir.program import CollectiveEvent, Event
from merakc.report.text import plan_table
from merakc.report.trace import write_trace
from merakc.report.units import format_bytes, format_seconds
from merakc.simulation.simulate import Simulation

TP, PP = 2, 2
MICRO_BATCHES = 4
STEPS = 40
LEARNING_RATE = 1e-3
# Float32 rounding in another order moves the loss by 2e-7 over thirty steps.
MAX_RELATIVE_DIFFERENCE = 1e-4
WARM_UP_STEPS = 3  # left out of the measured step time
TIMEOUT_S = 900.0
CURVES = (("#0072B2", "-", 4.0), ("#D55E00", "--", 2.6))  # the later thinner: equal ones show


@dataclass(frozen=True, slots=True)
class Settings:
    """The size of the run: by default ten million parameters, a second or two per step."""

    steps: int
    batch_size: int = 8
    sequence: int = 128
    hidden: int = 320
    layers: int = 8

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_size * self.sequence


@dataclass(frozen=True, slots=True)
class Run:
    """What one rank saw: losses and seconds of every step, its peak memory and last timeline."""

    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    peak_bytes: int = 0
    events: tuple[Event, ...] = ()
    plan: PlanFile | None = None
    simulation: Simulation | None = None
    collectives: tuple[CollectiveEvent, ...] = ()


def build_model(settings: Settings) -> nn.Module:
    """The same freshly initialised Llama at every call."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 16 // 5,
        num_hidden_layers=settings.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=settings.sequence,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.train()


def train_parallel(settings: Settings, text: torch.Tensor) -> Run:
    """The training on this rank of four; rank 0 shows its progress."""
    model = build_model(settings)
    batch = sample(text, settings.batch_size, settings.sequence, 0)
    parallel = merakc.auto_parallel(
        model, batch, dp=1, tp=TP, pp=PP, micro_batches=MICRO_BATCHES, schedule="1f1b"
    )
    console = Console(quiet=dist.get_rank() != 0)
    console.print(plan_table(parallel.plan_file))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)

    def step(batch: dict[str, torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = parallel(**batch).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    losses, step_s = _train(settings, text, step, console, f"tp {TP} x pp {PP}")
    parallel.record_collectives()
    step(batch)
    events, collectives = parallel.last_events, parallel.last_collectives
    parallel.record_collectives(False)
    peak_bytes = peak_live_bytes(parallel, optimizer, lambda: step(batch))
    return Run(
        losses,
        step_s,
        peak_bytes,
        events=tuple(events),
        plan=parallel.plan_file,
        simulation=parallel.simulation,
        collectives=collectives,
    )


def train_single(settings: Settings, text: torch.Tensor) -> Run:
    """The same training in one process, eager, with the same micro-batches."""
    model = build_model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(batch: dict[str, torch.Tensor]) -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in split_batch(batch, MICRO_BATCHES):  # all hold equally many labels
            loss = model(**part).loss / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    losses, step_s = _train(settings, text, step, Console(), "one process")
    return Run(losses, step_s)


def _train(
    settings: Settings,
    text: torch.Tensor,
    step: Callable[[dict[str, torch.Tensor]], float],
    console: Console,
    name: str,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Runs all steps under a progress bar; gives the losses and the seconds of each."""
    losses: list[float] = []
    step_s: list[float] = []
    more = "loss {task.fields[loss]:.3f}, {task.fields[rate]:,.0f} tokens/s"
    with bar(console, more) as progress:
        task = progress.add_task(name, total=settings.steps, loss=float("nan"), rate=0.0)
        for k in range(settings.steps):
            batch = sample(text, settings.batch_size, settings.sequence, k)
            start_s = time.perf_counter()
            losses.append(step(batch))
            step_s.append(time.perf_counter() - start_s)
            progress.update(task, advance=1, loss=losses[-1], rate=settings.tokens / step_s[-1])
    return tuple(losses), tuple(step_s)


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference over all steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def median_step_s(run: Run) -> float:
    """The median step, the first ones left out."""
    return statistics.median(run.step_s[WARM_UP_STEPS:] or run.step_s)


def comparison_table(runs: Sequence[Run], single: Run) -> Table:
    """What the simulator predicted and what was measured; the single process for scale."""
    assert runs[0].plan is not None
    prediction = runs[0].plan.prediction
    assert prediction is not None
    predicted, measured = prediction.step_s, median_step_s(runs[0])
    rows = [["", "predicted", "measured"]]
    rows.append(["step", format_seconds(predicted), format_seconds(measured)])
    mesh = runs[0].plan.decisions.mesh
    for rank, run in enumerate(runs):
        expected = format_bytes(prediction.peak_bytes[mesh.coordinates(rank)[1]])
        rows.append([f"peak of rank {rank}", expected, format_bytes(run.peak_bytes)])
    rows.append(["step of one process", "", format_seconds(median_step_s(single))])
    return rich_table(rows, title="Predicted and measured")


def plot_losses(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """Draws up to two curves of losses, step by step. The suffix gives the format."""
    figure = Figure(figsize=(8.0, 5.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for (name, losses), (colour, style, width) in zip(curves.items(), CURVES, strict=False):
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, label=name, color=colour, linestyle=style, linewidth=width)
    axes.set(title="Training loss", xlabel="step", ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(path)


def write_outputs(out: Path, runs: Sequence[Run], single: Run) -> None:
    """Writes `loss.png`, `plan.json` and `timeline.json` into the folder `out`."""
    plan, simulation = runs[0].plan, runs[0].simulation
    assert plan is not None
    assert simulation is not None
    out.mkdir(parents=True, exist_ok=True)
    plan.save(out / "plan.json")
    curves = {"one process": single.losses, f"tp {TP} x pp {PP}": runs[0].losses}
    plot_losses(out / "loss.png", curves)
    measured = [event for run in runs for event in run.events]
    write_trace(
        simulation.events, out / "timeline.json", measured=measured,
        collectives=simulation.collectives,
        inside=simulation.collectives_inside(range(len(runs))),
        measured_inside=[event for run in runs for event in run.collectives],
    )  # fmt: skip


def main(
    out: Annotated[Path, typer.Option(help="Folder for the plan and the pictures.")] = Path(
        "demo-out"
    ),
    steps: Annotated[int, typer.Option(help="Training steps.")] = STEPS,
) -> None:
    """Trains on four ranks and in one process; exits with 1 where the losses disagree."""
    start_s = time.perf_counter()
    console = Console()
    settings, text = Settings(steps=steps), library_bytes()
    runs = run_ranks(TP * PP, train_parallel, settings, text, timeout_s=TIMEOUT_S)
    (single,) = run_ranks(1, train_single, settings, text, timeout_s=TIMEOUT_S)
    console.print(comparison_table(runs, single))
    write_outputs(out, runs, single)
    difference = max(largest_difference(run.losses, single.losses) for run in runs)
    good = difference <= MAX_RELATIVE_DIFFERENCE
    console.print(
        f"loss {single.losses[0]:.4f} -> {single.losses[-1]:.4f}; four ranks against one process: "
        f"largest relative difference {difference:.1e} ({'agree' if good else 'DISAGREE'})"
    )
    console.print(
        f"{out}/loss.png, {out}/plan.json, {out}/timeline.json (open in ui.perfetto.dev); "
        f"{time.perf_counter() - start_s:.0f} s"
    )
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)

"""`python -m benchmarks.pseudo_to_real`: a GPT whose layers share parameters first, and then not.

Lin et al. 2021 (arXiv 2110.03888) train a model of 10 trillion parameters so. Here a small one
learns the source of Python's standard library three ways, a step of each in turn, until each has
had the same seconds. Then a model of the paper's size is planned on 512 V100 of 32 GB.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn

import merakc
from benchmarks.corpus import VOCABULARY, library_bytes, sample
from benchmarks.harness import rich_table
from merakc.cli.clusters import machines
from merakc.ir.precision import parse_precision
from merakc.planner.choose import compare
from merakc.planner.fit import fit_error
from merakc.planner.offline import Recordings
from merakc.planner.request import Request
from merakc.planner.sources.source import Source
from merakc.report.units import format_bytes, format_seconds

BATCH, LENGTH, RATE = 4, 64, 1e-3
HELD_OUT_BYTES, HELD_OUT = 200_000, range(10_000, 10_004)  # the last of the text; batches of it
# 10,240 experts of 2 x 1,024 x 9,984 elements in each of 48 layers make the paper's 10 trillion.
# The abstract, which is all of it that was at hand, does not say these four numbers: they are
# remembered, and fit that sum. Experts are of three matrices here, and as large.
LAYERS, WIDTH, EXPERTS, INNER = 48, 1024, 10_240, 9_984 * 2 // 3
# Not the paper's: a step's texts, and the tokens that days are told for.
TEXTS, TEXT_LENGTH, TOKENS = 4096, 512, 1e11
DEVICES, MICRO_BATCHES = 512, 8
COLOURS = {"real only": "#0072B2", "pseudo only": "#E69F00", "pseudo, then real": "#D55E00"}


def small_gpt(layers: int = 6, width: int = 96) -> nn.Module:
    """The same freshly initialised GPT-2 at every call."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()


@dataclass
class Run:
    """One way to train: the seconds it has had, and what held-out text loses at which of them."""

    name: str
    shares: bool
    untied_at: float  # of its seconds; never if infinite
    spent_s: float = 0.0
    steps: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = small_gpt()
        if self.shares:
            merakc.share_layers(model)
        self.model: Any = merakc.auto_parallel(model, sample(library_bytes(), BATCH, LENGTH, 0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)

    def timed(self, do: Callable[[], None]) -> None:
        """Spends seconds of this run."""
        start_s = time.perf_counter()
        do()
        self.spent_s += time.perf_counter() - start_s

    def step(self, text: torch.Tensor) -> None:
        """A step, and before it the untying if its time has come."""
        if self.shares and self.spent_s >= self.untied_at:
            self.shares = False
            merakc.untie_layers(self.model, self.optimizer)
        self.model(**sample(text, BATCH, LENGTH, self.steps)).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def look(self, held_out: torch.Tensor) -> None:
        """What the held-out text loses now."""
        self.model.eval()
        with torch.no_grad():
            losses = [self.model(**sample(held_out, BATCH, LENGTH, k)).loss for k in HELD_OUT]
        self.model.train()
        self.curve.append((self.spent_s, float(torch.stack(losses).mean())))


def train(seconds: float, share: float, points: int) -> list[Run]:
    """All three ways, in turns; each point of a curve is an equal part of the seconds."""
    text = library_bytes()
    text, held_out = text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:]
    never = float("inf")
    runs = [
        Run("real only", False, never), Run("pseudo only", True, never),
        Run("pseudo, then real", True, share * seconds),
    ]  # fmt: skip
    for run in runs:
        run.look(held_out)
    while any(run.spent_s < seconds for run in runs):
        for run in runs:
            if run.spent_s < seconds:
                run.timed(lambda run=run: run.step(text))  # type: ignore[misc]
                if run.spent_s >= seconds * len(run.curve) / points:
                    run.look(held_out)
    return runs


def training_table(runs: Sequence[Run]) -> Table:
    """Where each way has come."""
    rows = [("", "steps", "seconds", "loss at half", "loss at the end")]
    for run in runs:
        half = min(run.curve, key=lambda at: abs(at[0] - run.spent_s / 2))
        losses = f"{half[1]:.3f}", f"{run.curve[-1][1]:.3f}"
        rows.append((run.name, f"{run.steps}", f"{run.spent_s:.0f}", *losses))
    return rich_table(rows, title="Held-out loss at equal wall time")


def plot(path: Path, runs: Sequence[Run]) -> None:
    """Draws the losses over seconds; the suffix gives the format."""
    figure = Figure(figsize=(8.0, 5.0), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        axes.plot(*zip(*run.curve, strict=True), label=run.name, color=COLOURS[run.name])
        if run.untied_at < run.spent_s:
            axes.axvline(run.untied_at, color="#999999", linestyle=":", label="untied")
    axes.set(title="Pseudo-to-Real at equal wall time", xlabel="seconds", ylabel="held-out loss")
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(path)


def experts(layers: int = LAYERS, experts: int = EXPERTS) -> nn.Module:
    """A mixture of experts without values: each word goes to one expert of each layer."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=50_304, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, head_dim=WIDTH // 16, num_experts=experts, num_experts_per_tok=1,
        moe_intermediate_size=INNER, max_position_embeddings=TEXT_LENGTH, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = transformers.Qwen3MoeForCausalLM(config)
    return model


def planned(
    model: nn.Module, name: str, devices: int = DEVICES, offload: str = "none"
) -> tuple[str, ...]:
    """A row: what a plan of the model needs, on experts that are split over all devices."""

    def batch(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(samples, TEXT_LENGTH, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    count = sum(p.numel() for p in model.parameters())
    request = Request(
        devices, TEXTS, dp=1, tp=devices, pp=1, micro_batches=MICRO_BATCHES, recompute="full",
        precision=parse_precision("fp16-mixed"), couplings="per micro-batch",
        offload=offload,
    )  # fmt: skip
    cluster, told = machines("v100", "float16", devices), f"{count / 1e12:.3f}"
    record = Recordings(Source(name, model, batch), request, lambda _: None)
    found = compare(request, record, cluster)
    if not found.ranked:
        error = str(fit_error(request, record, cluster, found.table))
        need = re.search(r"needs ([\d.]+ \w+)", error)
        return name, told, need[1] if need else error, "no", "", ""
    step_s, peak_bytes = found.ranked[0].estimate.step_s, found.ranked[0].peak_bytes
    days = TOKENS / (TEXTS * TEXT_LENGTH) * step_s / 86_400
    return name, told, format_bytes(peak_bytes), "yes", format_seconds(step_s), f"{days:.0f}"


def plan_table() -> Table:
    """The plans with and without shared layers."""
    heads = "", "trillions", "a device needs", "fits", "a step", f"days of {TOKENS:.0e} tokens"
    model = experts()
    rows = [heads, planned(model, "real")]
    merakc.share_layers(model)
    rows.append(planned(model, "pseudo"))
    title = f"{LAYERS} layers of {EXPERTS:,} experts on {DEVICES} V100-32 (predicted)"
    caption = (
        f"dp=1 tp={DEVICES} pp=1, {MICRO_BATCHES} micro-batches, {TEXTS} texts of {TEXT_LENGTH}, "
        "recompute=full, fp16-mixed; estimated by pieces. Offload of parameters to the host's "
        "memory, by which the paper holds the real model, is not built; nor are experts over dp."
    )
    return rich_table(rows, title=title, caption=caption)


def main(
    seconds: Annotated[float, typer.Option(help="Seconds of training each way.")] = 60.0,
    share: Annotated[float, typer.Option(help="Of them before layers are untied.")] = 0.3,
    points: Annotated[int, typer.Option(help="Of a curve.")] = 20,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("pseudo-to-real.png"),
    plans: Annotated[bool, typer.Option(help="Plan the model of 10 trillion, too.")] = True,
) -> None:
    """Trains three ways at equal wall time, and plans a model of 10 trillion parameters."""
    console = Console()
    torch.set_num_threads(1)  # threads that wait for each other tell more of other programs
    if seconds > 0:
        runs = train(seconds, share, points)
        console.print(training_table(runs))
        plot(out, runs)
        console.print(f"{out}")
    if plans:
        console.print(plan_table())


if __name__ == "__main__":
    typer.run(main)

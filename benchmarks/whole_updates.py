"""`python -m benchmarks.whole_updates`: steps of Muon beside steps of AdamW, on every layout.

A GPT-2 of 100 million parameters, float32, on two ranks of one thread each. Muon updates the
matrices of the blocks, AdamW what is left, as its author has it; each matrix is whole on one of its
ranks for that. Both optimizers take turns on the same model. A step is the slowest rank's, from
batch to zeroed gradients; its CPU seconds are told too, which other programs on the machine hardly
change. Muon's arithmetic is more than AdamW's on one process too, which is the first row. Exits
with 1 where Muon's steps a second are less than 0.8 of AdamW's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import transformers
import typer
from rich.console import Console

import merakc
from benchmarks.harness import JsonPath, finish, known, rich_table
from benchmarks.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU

LEAST_RATIO = 0.8
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "dp 2, zero-1": {"dp": 2, "state_shards": "zero-1"},
}
WORDS, LENGTH = 20_000, 128
TIMEOUT_S = 3600.0
UNITS = {"_s": time.perf_counter, "_cpu_s": time.process_time}


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of steps on a layout, of each optimizer in turns."""

    layout: str
    adamw_s: tuple[float, ...]
    muon_s: tuple[float, ...]
    adamw_cpu_s: tuple[float, ...]
    muon_cpu_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Muon's steps a second, of AdamW's."""
        return statistics.median(self.adamw_s) / statistics.median(self.muon_s)

    @property
    def cpu_ratio(self) -> float:
        """The same, of CPU seconds."""
        return statistics.median(self.adamw_cpu_s) / statistics.median(self.muon_cpu_s)


def gpt2(layers: int, width: int) -> Any:
    """The model; with 12 layers of width 768 it has 100 million parameters."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=width // 64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def optimizers(model: Any, kind: str) -> list[torch.optim.Optimizer]:
    """AdamW of everything, or Muon of the blocks' matrices and AdamW of the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".h." in n]
    held = set(matrices)
    rest = [p for p in model.parameters() if p not in held]
    if kind == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=1e-4)]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-4)]


def measure(
    layout: dict[str, Any], size: tuple[int, int], samples: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each round's steps, behind one that warms up, of the clock and of the CPU."""
    torch.set_num_threads(1 if layout else torch.get_num_threads())
    ids = torch.randint(WORDS, (samples // layout.get("dp", 1), LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    model = gpt2(*size)
    if layout:
        model = merakc.auto_parallel(model, batch, micro_batches=2, cluster=NOMINAL_CPU, **layout)
    taken = {kind: optimizers(model, kind) for kind in ("adamw", "muon")}
    found: dict[str, list[float]] = {f"{kind}{unit}": [] for kind in taken for unit in UNITS}
    for _ in range(rounds + 1):
        for kind, own in taken.items():
            if layout:
                dist.barrier()
            starts_s = [clock() for clock in UNITS.values()]
            model(**batch)["loss"].backward()
            for optimizer in own:
                optimizer.step()
            model.zero_grad()
            for (unit, clock), start_s in zip(UNITS.items(), starts_s, strict=True):
                found[f"{kind}{unit}"].append(clock() - start_s)
    return {kind: seconds[1:] for kind, seconds in found.items()}


def measured(name: str, size: tuple[int, int], samples: int, rounds: int) -> Row:
    """A layout's row."""
    layout = LAYOUTS[name]
    if layout:
        everyone = run_ranks(
            2, partial(measure, layout, size, samples, rounds), timeout_s=TIMEOUT_S
        )
    else:
        everyone = [measure(layout, size, samples, rounds)]
    slowest = {
        kind: tuple(max(of) for of in zip(*(one[kind] for one in everyone), strict=True))
        for kind in everyone[0]
    }
    return Row(name, **slowest)


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """What is shown of them."""
    head = ("", "AdamW, s", "Muon, s", "Muon's steps a second, of AdamW's", "of CPU seconds")
    medians = [(statistics.median(r.adamw_s), statistics.median(r.muon_s)) for r in rows]
    return [
        head,
        *((r.layout, f"{a:.2f}", f"{m:.2f}", f"{r.ratio:.2f}", f"{r.cpu_ratio:.2f}")
          for r, (a, m) in zip(rows, medians, strict=True)),
    ]  # fmt: skip


def main(
    samples: Annotated[int, typer.Option(help="Of 128 words, in a step.", min=4)] = 32,
    rounds: Annotated[int, typer.Option(help="Steps of each.", min=1)] = 3,
    layers: Annotated[int, typer.Option(help="Of width 768; 12 are 100 million.", min=2)] = 12,
    layouts: Annotated[str, typer.Option(help="Layouts, with commas between; or all.")] = "",
    json_path: JsonPath = None,
) -> None:
    """Measure layouts."""
    console = Console()
    names = known(layouts, [*LAYOUTS], "--layouts")
    rows = [measured(name, (layers, 768), samples, rounds) for name in names]
    console.print(rich_table(table(rows)))
    low = [r.layout for r in rows if r.ratio < LEAST_RATIO]
    finish(console, not low, ", ".join(low), json_path=json_path, figures=rows)


if __name__ == "__main__":
    typer.run(main)

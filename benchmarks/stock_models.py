"""`python -m benchmarks.stock_models`: stock models through torch's pipeline tracer and merakc.

Twelve small variants of transformers' models, as they are, cut into two and three pipeline stages:
by `torch.distributed.pipelining.pipeline` with 1F1B, as its tutorial writes it, and by
`merakc.auto_parallel`. The loss and every gradient of a step are compared with the plain model in
one process: torch's in float32, merakc's in float64 with the models' own casts to float32 lifted
on both sides. All labels count, so that the mean over micro-batches is that of the batch.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

import merakc
from benchmarks.harness import DocPath, JsonPath, bar, finish, markdown, rich_table
from benchmarks.models import MODELS, ModelCase, shifted, words
from benchmarks.peers.results import reason
from benchmarks.ranks import RankError, RankTimeoutError, run_ranks
from benchmarks.reports import told_run
from merakc.equality.casts import lifted_casts
from merakc.equality.compare import Reference, worst_differences

# The lists of layers of each model, where torch's tracer is told to cut.
LAYERS: dict[str, tuple[str, ...]] = {
    "llama": ("model.layers",),
    "llama_tied": ("model.layers",),
    "qwen2": ("model.layers",),
    "mistral": ("model.layers",),
    "mixtral": ("model.layers",),
    "gpt_neox": ("gpt_neox.layers",),
    "gpt2": ("transformer.h",),
    "opt": ("model.decoder.layers",),
    "bert": ("bert.encoder.layer",),
    "t5": ("encoder.block", "decoder.block"),
    "bart": ("model.encoder.layers", "model.decoder.layers"),
    "whisper": ("model.encoder.layers", "model.decoder.layers"),
}
STAGES = (2, 3)
BATCH_SIZE, MICRO_BATCHES = 8, 4
BOUNDS = {"torch": 1e-3, "merakc": 1e-10}  # float32 has seven digits, float64 sixteen
TIMEOUT_S = 120.0
WIDTH = 130


@dataclass(frozen=True, slots=True)
class Cell:
    """A model in so many stages of a system: errors relative to one process's, or why none."""

    model: str
    system: str
    stages: int
    loss_error: float = float("nan")
    gradient_error: float = float("nan")
    worst: str = ""
    failure: str = ""

    @property
    def right(self) -> bool:
        """Whether loss and gradients are those of one process."""
        bound = BOUNDS[self.system]
        return not self.failure and self.loss_error <= bound and self.gradient_error <= bound


def cuts(model: str, stages: int) -> list[str]:
    """The modules that a stage begins with, after the first one."""
    lists = LAYERS[model]
    if len(lists) == 2:  # two layers each
        encoder, decoder = lists
        return [f"{encoder}.1", f"{decoder}.0"][-(stages - 1) :]
    at = {2: (2,), 3: (1, 3)}[stages]  # of four layers
    return [f"{lists[0]}.{k}" for k in at]


def even_batch(case: ModelCase, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A batch of which nothing is padding and every label counts."""
    config: Any = case.model().config
    generator = torch.Generator().manual_seed(1)
    batch = case.batch(BATCH_SIZE, dtype)
    batch.pop("attention_mask", None)
    for name in batch.keys() & {"input_ids", "labels"}:
        batch[name] = words(tuple(batch[name].shape), generator, config.vocab_size)
    if config.is_encoder_decoder:
        shape = tuple(batch["labels"].shape)
        batch["decoder_input_ids"] = words(shape, generator, config.vocab_size)
    return batch


def loss_of(case: ModelCase) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The model's own loss, from what its forward gives without labels."""

    def loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
        if isinstance(output, Mapping):
            output = output["logits"]
        logits = output[0] if isinstance(output, (tuple, list)) else output
        if case.valid_labels is shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return loss


def train_torch(name: str, stages: int) -> Reference:
    """One rank's part of a step; everything is there on rank 0. Collective."""
    warnings.simplefilter("ignore")
    case, rank = MODELS[name], dist.get_rank()
    model, batch = case.model(), even_batch(case, torch.float32)
    labels = batch.pop("labels")
    pipe = pipeline(
        model,
        mb_args=(),
        mb_kwargs={key: value.chunk(MICRO_BATCHES)[0] for key, value in batch.items()},
        split_spec=dict.fromkeys(cuts(name, stages), SplitPoint.BEGINNING),
    )
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of(case))
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(**batch)
    elif rank == stages - 1:
        schedule.step(target=labels, losses=losses)
    else:
        schedule.step()
    own = {key: p.grad for key, p in stage.submod.named_parameters() if p.grad is not None}
    found: list[Any] = [None] * stages
    mean = float(torch.stack(losses).mean()) if losses else 0.0
    dist.gather_object((mean, own), found if rank == 0 else None)
    gradients: dict[str, torch.Tensor] = {}
    for _, listed in reversed([each for each in found if each is not None]):
        gradients |= listed
    loss = found[-1][0] if rank == 0 else 0.0
    return Reference((loss,), (gradients,), {}, {})


def train_merakc(name: str, stages: int) -> Reference:
    """The same by merakc, in float64. Collective."""
    case = MODELS[name]
    model, batch = case.model(torch.float64), even_batch(case, torch.float64)
    with lifted_casts():
        parallel = merakc.auto_parallel(
            model, batch, dp=1, tp=1, pp=stages, micro_batches=MICRO_BATCHES
        )
        loss = parallel(**batch)["loss"]
        loss.backward()
        return Reference((loss.item(),), (parallel.full_gradients(),), {}, {})


SYSTEMS = {"torch": train_torch, "merakc": train_merakc}


def train_plain(name: str, system: str) -> Reference:
    """One process, eager, on the whole batch, in the arithmetic of a system."""
    case = MODELS[name]
    dtype = torch.float32 if system == "torch" else torch.float64
    model, batch = case.model(dtype), even_batch(case, dtype)
    with nullcontext() if system == "torch" else lifted_casts():
        loss = model(**batch).loss
        loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return Reference((loss.item(),), (gradients,), {}, {})


def measure(name: str, system: str, stages: int, wanted: Reference) -> Cell:
    """One cell, on forked ranks."""
    cell = Cell(name, system, stages)
    try:
        got = run_ranks(stages, SYSTEMS[system], name, stages, timeout_s=TIMEOUT_S)[0]
    except (RankError, RankTimeoutError) as error:
        return dataclasses.replace(cell, failure=reason(str(error)))
    return compared(cell, got, wanted)


def compared(cell: Cell, got: Reference, wanted: Reference) -> Cell:
    """The cell, with how far a step is from that of one process."""
    # A tied weight that is cut off from its twin is there under both names: the first counts.
    known = {key: g for key, g in got.gradients[0].items() if key in wanted.gradients[0]}
    got = dataclasses.replace(got, gradients=(known,))
    found = worst_differences(got, [got.losses], wanted, BOUNDS[cell.system])
    worst = found["gradient"]
    return dataclasses.replace(
        cell, loss_error=found["loss"].error, gradient_error=worst.error,
        worst=worst.name.partition(" of ")[2].partition(" of ")[2],
    )  # fmt: skip


def cell_text(cell: Cell, reasons: list[str]) -> str:
    """What the table says, with rich's markup."""
    if cell.failure:
        return f"[red]fails {reasons.index(cell.failure) + 1}[/]"
    if cell.right:
        return f"[green]right, {cell.gradient_error:.0e}[/]"
    loss = "right" if cell.loss_error <= BOUNDS[cell.system] else f"off by {cell.loss_error:.0e}"
    return f"[red]gradient of {cell.worst} off by {cell.gradient_error:.2g}, loss {loss}[/]"


def rows_of(cells: list[Cell], reasons: list[str]) -> list[list[str]]:
    """A row a model, headed; a column a system and number of stages."""
    columns = list(dict.fromkeys((cell.system, cell.stages) for cell in cells))
    rows = [["model", *(f"{system}, {stages} stages" for system, stages in columns)]]
    for model in dict.fromkeys(cell.model for cell in cells):
        own = {(c.system, c.stages): cell_text(c, reasons) for c in cells if c.model == model}
        rows.append([model, *(own[column] for column in columns)])
    return rows


def score(cells: list[Cell]) -> list[str]:
    """How many models each system trains right in all numbers of stages, and silently wrong."""
    lines = []
    for system in dict.fromkeys(cell.system for cell in cells):
        own = [cell for cell in cells if cell.system == system]
        models = {cell.model for cell in own}
        bad = {cell.model for cell in own if not cell.right}
        silent = {cell.model for cell in own if not (cell.right or cell.failure)}
        lines.append(
            f"{system}: {len(models - bad)} of {len(models)} models train right in all numbers of "
            f"stages, {len(silent)} train wrong without an error"
        )
    return lines


def document(cells: list[Cell], reasons: list[str], wall_s: float, arguments: list[str]) -> str:
    """The table as a page of the documentation."""
    listed = "\n".join(f"{k}. {text}" for k, text in enumerate(reasons, 1)) or "Nothing fails."
    scores = "\n".join(f"- {line}" for line in score(cells))
    return f"""# Stock models, cut by torch's tracer and by merakc

{told_run("benchmarks.stock_models", arguments)} {wall_s:.0f} s in all.

Small variants of transformers' models, unmodified, in two and three pipeline stages with
{MICRO_BATCHES} micro-batches: by `torch.distributed.pipelining`, whose tracer is told before
which layers to cut, with its 1F1B; and by `merakc.auto_parallel`. The figure is
the largest relative error of a gradient, against the plain model in one process: torch in float32,
right below {BOUNDS["torch"]:.0e}; merakc in float64 with the models' own casts to float32 lifted on
both sides, right below {BOUNDS["merakc"]:.0e}.

{markdown(rows_of(cells, reasons))}

{scores}

{listed}
"""


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(LAYERS),
    systems: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(SYSTEMS),
    stages: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(map(str, STAGES)),
    json_path: JsonPath = None,
    doc: DocPath = None,
) -> None:
    """Trains a step of each; exits with 1 where merakc is not right."""
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    console = Console()
    console.width = max(console.width, WIDTH)
    names, counts = models.split(","), [int(count) for count in stages.split(",")]
    cells = []
    with bar(console) as progress:
        task = progress.add_task("", total=len(names) * len(systems.split(",")) * len(counts))
        for name in names:
            for system in systems.split(","):
                wanted = train_plain(name, system)
                for count in counts:
                    progress.update(task, description=f"{name}, {system}, {count} stages")
                    cells.append(measure(name, system, count, wanted))
                    progress.advance(task)
    reasons = list(dict.fromkeys(cell.failure for cell in cells if cell.failure))
    title = "A training step in pipeline stages, against one process"
    rows = rows_of(cells, reasons)
    console.print(rich_table(rows, left=len(rows[0]), title=title))
    for line in (*(f"{k}. {text}" for k, text in enumerate(reasons, 1)), *score(cells)):
        console.print(line, markup=False)
    good = all(cell.right for cell in cells if cell.system == "merakc")
    wall_s = time.perf_counter() - start_s
    finish(
        console, good, f"{len(cells)} cells, {wall_s:.0f} s", json_path=json_path,
        figures={"passed": good, "wall_s": wall_s, "cells": cells}, doc=doc,
        page=lambda: document(cells, reasons, wall_s, sys.argv[1:]),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)

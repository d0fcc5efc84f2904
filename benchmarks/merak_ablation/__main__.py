"""`python -m benchmarks.merak_ablation`: Merak's ablation, simulated for its setting.

Merak (Lai et al., arXiv 2206.04959) adds three things to 3D parallelism, one after the other: a
shifted critical path, recomputation by stage, and tensor parallelism in sub-micro-batches. Here
the same GPTs are simulated on the same cluster, with costs of kernels by shape and orders of work
that really run, beside the best plan of this project. The published speedups stand beside it; no
assumption was chosen to meet them.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import merakc
from benchmarks.gpt import Shape
from benchmarks.harness import DocPath, JsonPath, finish, markdown, rich_table
from benchmarks.merak_ablation.plans import (
    RESERVED_BYTES,
    Found,
    Laid,
    Layout,
    Setting,
    fastest,
    late,
    lay_out,
    layouts,
    our_best,
    shifted,
    stage_aware,
    unrecomputed,
)
from merakc.machines.cluster import Hardware
from merakc.machines.cluster_files import preset

# Sequences of a Megatron-LM of these sizes, and a step of its 8.3 billion parameters (Shoeybi et
# al., arXiv 1909.08053, section 5.1); its vocabulary, padded for tp = 8.
SEQ_LEN, BATCH, VOCAB = 1024, 512, 51200
FEW = 128
NODES, PER_NODE = 16, 4
STAGED_BYTES_PER_S = 8e9
MICRO_BATCHES = (1, 2, 4, 8)
PARTS = 2
TABLE_WIDTH = 170


@dataclass(frozen=True, slots=True)
class Model:
    """A GPT, and how much faster Merak was than the best other framework."""

    name: str
    shape: Shape
    published: float


MODELS = (
    Model("1.5B", Shape(1600, 25, 48, SEQ_LEN, VOCAB), 1.42),
    Model("2.5B", Shape(1920, 20, 54, SEQ_LEN, VOCAB), 1.39),
    Model("8.3B", Shape(3072, 24, 72, SEQ_LEN, VOCAB), 1.43),
    Model("20B", Shape(6144, 64, 44, SEQ_LEN, VOCAB), 1.61),
)
BASELINE = "Megatron-style"
MERAK = "+ sub-pipelined tp"
FREE = "the same, at its own best degrees"
OURS = "our own best plan"
KEPT = "Megatron-style, nothing recomputed"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table; `found` of None does not fit, `same` is no better than the row above."""

    model: str
    label: str
    found: Found | None
    ratio: float
    published: float | None = None
    same: bool = False


def merak_hardware(local_bytes_per_s: float | None = None) -> Hardware:
    """The cluster: 16 nodes of 4 RTX 3090 on 100 Gb/s; links in a node of the preset, or other."""
    given = preset("rtx-3090", NODES)
    inside, outside = given.links
    inside = replace(inside, devices=PER_NODE)
    if local_bytes_per_s is not None:
        inside = replace(inside, bytes_per_s=local_bytes_per_s)
    nodes = tuple(replace(n, devices=PER_NODE) for n in given.nodes)
    return replace(given, nodes=nodes, links=(inside, replace(outside, shared_by=PER_NODE)))


def settings() -> tuple[Setting, ...]:
    """What the table is made for: the first two in full, the others to see what they hang on."""
    usual, staged = merak_hardware(), merak_hardware(STAGED_BYTES_PER_S)
    return (
        Setting("the baseline's best degrees", usual, BATCH, (1, 2, 4)),
        Setting("tp = 4", usual, BATCH, (4,), whole_heads=False),
        Setting("tp = 4, links in a node of 8 GB/s", staged, BATCH, (4,), whole_heads=False),
        Setting("tp = 4, 128 sequences a step", usual, FEW, (4,), whole_heads=False),
    )


Step = Callable[[Laid], Iterator[Found | None]]


def ablation(
    model: Model, setting: Setting, ours: Found | None, micro_batches: Sequence[int] = MICRO_BATCHES
) -> list[Row]:
    """The rows of a model. What does not pay is left off, as users would."""

    def best(step: Step, of: Sequence[Layout]) -> Found | None:
        laid = (lay_out(model.shape, setting, layout) for layout in of)
        return fastest(found for one in laid if one for found in step(one))

    every, divided = ([*layouts(setting, micro_batches, parts)] for parts in (0, PARTS))
    base = best(late, every)
    if base is None:
        return [Row(model.name, BASELINE, None, 0.0)]
    degrees = base.laid.layout.tp, base.laid.layout.pp
    own, halves = ([o for o in some if (o.tp, o.pp) == degrees] for some in (every, divided))
    rows = [Row(model.name, BASELINE, base, 1.0)]
    now = base
    for label, steps in (
        ("+ shifted critical path", [(shifted, own)]),
        ("+ stage-aware recomputation", [(stage_aware, own)]),
        (MERAK, [(late, halves), (shifted, halves), (stage_aware, halves)]),
    ):
        found = fastest(best(step, of) for step, of in steps)
        same = found is None or found.step_s >= now.step_s
        now = now if found is None or same else found
        published = model.published if label == MERAK else None
        rows.append(Row(model.name, label, now, base.step_s / now.step_s, published, same))
    both = [*every, *divided]
    free = fastest([now, *(best(step, both) for step in (shifted, stage_aware))])
    kept = best(unrecomputed, every)
    for label, found in ((FREE, free), (KEPT, kept), (OURS, ours)):
        rows.append(Row(model.name, label, found, base.step_s / found.step_s if found else 0.0))
    return rows


def cells(row: Row, setting: Setting) -> list[str]:
    """A row as text."""
    published = f"{row.published:.2f}" if row.published else ""
    if row.found is None:
        return [row.model, row.label, "does not fit", "", "", "", "", "", published]
    laid, found = row.found.laid, row.found
    layout, strategy = laid.layout, laid.strategy
    how = [found.how]
    how += [f"{layout.parts} parts" if layout.parts > 1 else "overlapped"] if layout.parts else []
    how += ["sequence parallel"] if layout.sequence_parallel else []
    how += ["ZeRO-1"] if layout.zero else []
    return [
        row.model,
        row.label,
        f"{strategy.tp}·{strategy.pp}·{strategy.dp}",
        f"{strategy.micro_batches} x {layout.micro_batch}",
        "as above" if row.same else ", ".join(how),
        f"{found.peak_bytes / 1e9:.1f}",
        f"{found.step_s:.2f}",
        f"{row.ratio:.2f}",
        published,
    ]


HEADS = (
    "model", "", "tp·pp·dp", "micro-batches", "what runs", "GB", "step s", "speedup", "published"
)  # fmt: skip


def rows_table(setting: Setting, rows: Sequence[Row]) -> Table:
    """All rows of a setting."""
    body = [cells(row, setting) for row in rows]
    return rich_table([HEADS, *body], left=5, title=setting.label, title_justify="left")


def summary(found: Sequence[tuple[Setting, Sequence[Row]]]) -> str:
    """Merak's and our own speedup in every setting, as Markdown."""
    body = []
    shown = {MERAK: "Merak's three", FREE: "Merak's three, its own degrees", OURS: "our best plan"}
    for setting, rows in found:
        for label, name in shown.items():
            ratios = {row.model: f"{row.ratio:.2f}" for row in rows if row.label == label}
            body.append([setting.label, name,
                         *(ratios.get(m.name, "–") for m in MODELS)])  # fmt: skip
    body.append(["published", "Merak", *(f"{m.published:.2f}" for m in MODELS)])
    heads = ("setting", "speedup over Megatron-style", *(m.name for m in MODELS))
    return markdown([heads, *body])


FOUND = """Nothing was tuned to meet what was published, and most of it is missed, on either side:

- **Where the baseline may choose its degrees**, it takes tp = 1 on the three smaller models, and
  there is nothing to sub-pipeline; on the largest it takes tp = 2, where parts would need twice the
  micro-batch, and memory. Merak's three stay far below the published ratios. What they gain is
  recomputation that was not needed: a baseline that keeps everything, at degrees where that fits,
  is as fast or faster ("nothing recomputed" below). With which degrees the paper's baselines ran is
  not known here.
- **With tp = 4**, a whole node, as Megatron-LM's papers advise, sub-pipelining is worth a quarter
  on 1.5 and 2.5 billion parameters, a tenth on 8.3, next to nothing on 20. The sum is above the
  published ratio on the small models and below it on the large ones.
- **20 billion parameters miss most**, where the paper gains most. Their state leaves little of
  24 GB: a micro-batch of two sequences, which parts need, takes the place of blocks that would be
  kept. What fits decides here, and it is the least certain figure of the model.
- **Slower links in a node** make sub-pipelining worth more, and tp = 4 a worse choice, which our
  plans, free to do so, leave. With **fewer sequences** the shifted critical path is worth more, as
  it should be: what it saves does not grow with the number of micro-batches.
- **The shifted critical path** helps little by itself with so many micro-batches. Where the
  pipeline has one stage, its row says no more than that the last stage recomputes nothing.
- **Our own best plan** is faster than Merak's three at degrees of their own in every cell, by a
  tenth where those are free. It recomputes nothing: deeper pipelines, ZeRO-1 and sequence
  parallelism make room, split backwards and generated orders fill the bubbles, and stages are cut
  by time around the head."""
PAGE = """# Merak's ablation, simulated

`python -m benchmarks.merak_ablation`, {today}, {versions}, {wall_s:.0f} s on
one core of a machine that did other work too. Everything is simulated; no GPU was used.

Merak (Lai et al., arXiv 2206.04959) adds a shifted critical path, recomputation by stage and
sub-pipelined tensor parallelism to 3D parallelism, and was up to 1.42, 1.39, 1.43 and 1.61 times
as fast as the best other framework on GPTs of 1.5, 2.5, 8.3 and 20 billion parameters. Below are
the simulated steps for that setting. "Speedup" is over the first row of each model.

{summary}

{found}

## What is assumed

- **Machines**: {nodes} nodes of {per_node} RTX 3090 (24 GB) on 100 Gb/s, from secondary sources.
  Figures of the `rtx-3090` preset, with the constants that were fitted for an A100: nobody has
  measured them here. {usable_gb:.1f} GB of each device can be used; the rest is CUDA's context,
  NCCL's buffers and fragments.
- **Links in a node**: PCIe 4 x16 for each device, 31.5 GB/s a direction, of which programs reach
  82 %. GeForce cards copy through the host's memory, so that this is the most that can be hoped
  for; one setting has 8 GB/s.
- **Models**: the usual shapes of these sizes (48 x 1600 with 25 heads, 54 x 1920 with 20, 72 x
  3072 with 24, 44 x 6144 with 64): the paper's table was not to be had. Sequences of {seq_len}
  tokens, a vocabulary of {vocab}, dropout, attention as a softmax between two products. {batch}
  sequences a step (Megatron-LM's for 8.3 billion parameters, Shoeybi et al. 2019); one setting
  has {few}.
- **Precision**: 16 bits to compute with and for gradients, 12 bytes a parameter for Adam: 16
  bytes.
- **The baseline**: Megatron-LM as in 2021: 1F1B, every block recomputed in its own backward,
  gradients reduced after the last micro-batch, no sharded optimizer, dp ranks next to each other,
  messages split over tp. tp stays inside a node and divides the heads (not where tp = 4 is given:
  25 heads do not divide). Layers are spread as evenly as they go, where Megatron-LM wants them to
  divide. Of all tp, pp, dp and micro-batches of {micro_batches} sequences that fit, the fastest.
- **The next three rows** keep the baseline's tp, pp and dp, and choose the micro-batch anew. What
  does not pay is left off. *Shifted critical path*: recomputed before the gradient arrives, where
  a whole stage's activations fit, nothing on the last stage, Merak's order. *Stage-aware*: each
  stage recomputes as few of its blocks as its memory allows, solved and not given as a ratio.
  *Sub-pipelined*: two parts of a micro-batch, in the order that the list scheduler of merakc's
  pass finds for their kernels; the parts' products are priced as the smaller ones that they are,
  all kernels are launched twice, and what runs beside a collective is slower by 12.6 %.
- **Our own best plan** chooses tp, pp, dp, micro-batches, known and generated schedules (V-shaped
  and interleaved stages, split backwards), recomputation, sequence parallelism, ZeRO-1 and the
  number of parts; stages are cut by time, and gradients are reduced under the backward. Its
  kernels are the same ones. Selective recomputation is not among the choices: pieces do not tell
  what of a block may be kept.

## In full

{tables}
"""


def document(found: Sequence[tuple[Setting, Sequence[Row]]], wall_s: float) -> str:
    """The page of the documentation."""
    memory_bytes = found[0][0].hardware.slowest.memory_bytes
    tables = "\n\n".join(
        f"### Setting: {setting.label}\n\n"
        + markdown([HEADS, *(cells(row, setting) for row in rows)])
        for setting, rows in found[:2]
    )
    return PAGE.format(
        today=datetime.date.today(),
        versions=f"merakc {merakc.__version__}, torch {torch.__version__}",
        wall_s=wall_s,
        summary=summary(found),
        found=FOUND,
        nodes=NODES,
        per_node=PER_NODE,
        usable_gb=(memory_bytes - RESERVED_BYTES) / 1e9,
        seq_len=SEQ_LEN,
        vocab=VOCAB,
        batch=BATCH,
        few=FEW,
        micro_batches=", ".join(map(str, MICRO_BATCHES)),
        tables=tables,
    )


def figures(found: Sequence[tuple[Setting, Sequence[Row]]]) -> list[dict[str, Any]]:
    """Everything, for JSON."""
    return [
        {
            "setting": setting.label,
            "model": row.model,
            "row": row.label,
            "ratio": row.ratio,
            "published": row.published,
            "step_s": row.found.step_s if row.found else None,
            "peak_bytes": row.found.peak_bytes if row.found else None,
            "degrees": dataclasses.asdict(row.found.laid.strategy) if row.found else None,
            "layout": dataclasses.asdict(row.found.laid.layout) if row.found else None,
            "how": row.found.how if row.found else None,
        }
        for setting, rows in found
        for row in rows
    ]


def main(
    json_path: JsonPath = None,
    doc: DocPath = None,
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(
        model.name for model in MODELS
    ),
) -> None:
    """Simulates Merak's ablation, and prints it beside what was published."""
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    chosen = [model for model in MODELS if model.name in models.split(",")]
    found: list[tuple[Setting, list[Row]]] = []
    known: dict[tuple[str, Hardware, int], Found | None] = {}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(settings()) * len(chosen))
        for setting in settings():
            rows: list[Row] = []
            for model in chosen:
                progress.update(bar, description=f"{model.name}, {setting.label}")
                key = model.name, setting.hardware, setting.batch
                if key not in known:
                    known[key] = our_best(model.shape, setting, MICRO_BATCHES)
                rows += ablation(model, setting, known[key])
                progress.advance(bar)
            found.append((setting, rows))
            console.print(rows_table(setting, rows))
    wall_s = time.perf_counter() - start_s
    finish(
        console, True, f"{wall_s:.0f} s", json_path=json_path, figures=figures(found), doc=doc,
        page=lambda: document(found, wall_s),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)

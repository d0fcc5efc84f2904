"""`python -m benchmarks.zero_study`: ZeRO's stages on encoder-decoders, from one node to eight.

The mT5 models of 580M to 13B parameters (arXiv 2010.11934, with one between the two largest) are
recorded without weights, and a step in each stage of ZeRO is predicted on nodes of eight A100s:
seconds, the share of them that waits for communication, memory, and whether it fits. Then small
mT5s train in each stage on two and four ranks of this machine (`benchmarks.zero_study.measured`).
Exits with 1 where stage 2 is not faster than stage 3 for the largest model on any number of nodes,
as was published for it (arXiv 2310.05350), or for a small one on this machine; or where measured
state is more than 2 % off the formula.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness import DocPath, JsonPath, finish
from benchmarks.reports import told_run
from benchmarks.zero_study.layers import graph_layers
from benchmarks.zero_study.measured import ROUNDS, SMALL, Row, measure, measured_table, misses
from benchmarks.zero_study.models import Size, mt5
from merakc.analysis.liveness import live_bytes
from merakc.costs.fabric import Fabric
from merakc.costs.state import DpGroup, Layer, state_cost
from merakc.frontend.record import record
from merakc.ir.graph import InputKind
from merakc.ir.state import StateShards
from merakc.machines.cluster import Cluster
from merakc.report.units import format_bytes

WIDTH = 110  # of what is printed, at least
# NVIDIA's data sheet of the A100 80 GB: 312 TFLOP/s, 2.04 TB/s, NVLink 300 GB/s a direction; half
# the peak rate of products, and 70 % of a link. A node has 4 x 200 Gb/s to the others.
A100 = Cluster(
    "A100",
    1.56e14,
    2.04e12,
    op_overhead_s=5e-6,
    memory_bytes=80 * 10**9,
    link_latency_s=1e-5,
    link_bytes_per_s=2.1e11,
)
FABRIC = Fabric(8, 0.7 * 300e9, 0.7 * 100e9, 1e-5, 3e-5)
OVERLAP = 0.37  # of a collective's speed while kernels run: fitted by benchmarks.state_model
SAMPLES, SOURCE_TOKENS, TARGET_TOKENS, MICRO_BATCHES = 4, 512, 128, 4
BUCKET_BYTES = 100 << 20
RESERVED_SHARE = 0.05  # the allocator's, the communication library's and temporaries'
VOCABULARY = 250112
NODES = (1, 2, 4, 8)


SIZES = (
    Size("580M", 768, 2048, 12, 12),
    Size("1.2B", 1024, 2816, 24, 16),
    Size("3.7B", 2048, 5120, 24, 32),
    Size("7.7B", 3072, 7680, 24, 48),  # between two published ones
    Size("13B", 4096, 10240, 24, 64),
)


@dataclass(frozen=True, slots=True)
class Model:
    """A recorded model. `recompute` says that its activations are recomputed layer by layer."""

    name: str
    layers: list[Layer]
    activation_bytes: int
    recompute: bool

    @property
    def parameters(self) -> int:
        """Trained parameters."""
        return sum(layer.parameters for layer in self.layers)


def build(size: Size) -> Model:
    """Records a stock mT5 on device meta; activations are recomputed where they fill the device."""
    with torch.device("meta"):
        model = mt5(size, VOCABULARY).to(torch.bfloat16).train()
    source = torch.zeros(SAMPLES, SOURCE_TOKENS, dtype=torch.long)
    target = torch.zeros(SAMPLES, TARGET_TOKENS, dtype=torch.long)
    graph = record(model, (), {"input_ids": source, "labels": target}).graph
    kept = sum(
        o.size_bytes
        for n in graph.nodes
        if n.grad
        for o in n.outputs
        if o is not None and o.dtype.is_floating_point
    )
    recompute = kept > A100.memory_bytes / 4
    blocks = 2 * size.layers
    least = live_bytes(graph).peak_bytes
    activation_bytes = least + (kept // blocks if recompute else kept)
    assert any(i.kind is InputKind.PARAMETER for i in graph.inputs)
    layers = graph_layers(graph, A100, BUCKET_BYTES, recompute=recompute)
    return Model(size.name, layers, activation_bytes, recompute)


def zero(stage: int, ranks: int) -> StateShards:
    """ZeRO's stages 0 to 3 as shards of parameters, gradients and optimizer state."""
    return StateShards(*(ranks if stage >= least else 1 for least in (3, 2, 1)))


@dataclass(frozen=True, slots=True)
class Result:
    """A predicted step."""

    model: str
    parameters: int
    stage: int
    nodes: int
    step_s: float
    exposed_share: float
    memory_bytes: int

    @property
    def fits(self) -> bool:
        """Whether a device holds it."""
        return self.memory_bytes <= (1 - RESERVED_SHARE) * A100.memory_bytes


def predict(model: Model, stage: int, nodes: int) -> Result:
    """A step of `MICRO_BATCHES` micro-batches a rank."""
    ranks = nodes * FABRIC.ranks_per_node
    cost = state_cost(
        model.layers,
        MICRO_BATCHES,
        zero(stage, ranks),
        DpGroup(ranks, FABRIC, overlap=OVERLAP),
        optimizer_bytes_per_s=A100.bytes_per_s,
    )
    return Result(
        model.name, model.parameters, stage, nodes=nodes, step_s=cost.step_s,
        exposed_share=cost.exposed_s / cost.step_s,
        memory_bytes=cost.state_bytes + model.activation_bytes,
    )  # fmt: skip


def results_table(results: Sequence[Result]) -> Table:
    """A row a model and stage, the nodes side by side."""
    table = Table(
        title="Seconds a step (share waiting for communication), memory; ✗: too much",
        box=box.SIMPLE_HEAD,
    )
    for name in ("mT5", "ZeRO"):
        table.add_column(name)
    for nodes in NODES:
        table.add_column(f"{nodes * FABRIC.ranks_per_node} GPUs", justify="right")
    rows: dict[tuple[str, int], list[Result]] = {}
    for found in results:
        rows.setdefault((found.model, found.stage), []).append(found)
    for (model, stage), own in rows.items():
        cells = (
            f"{r.step_s:.2f} ({r.exposed_share:.0%})\n{format_bytes(r.memory_bytes)}"
            f"{'' if r.fits else ' ✗'}"
            for r in own
        )
        table.add_row(model, str(stage), *cells, end_section=stage == 3)
    return table


def study(sizes: Sequence[Size], console: Console) -> list[Result]:
    """Predicts every stage on every number of nodes."""
    results: list[Result] = []
    with console.status("") as status:
        for size in sizes:
            status.update(f"recording mT5 {size.name}")
            model = build(size)
            results += [predict(model, stage, n) for stage in range(4) for n in NODES]
    return results


def measured(sizes: Sequence[Size], rounds: int, console: Console) -> list[list[Row]]:
    """Measures every stage of the small models."""
    groups = []
    with console.status("training small mT5s") as status:
        for rows in measure(sizes, rounds):
            status.update(f"trained mT5 {rows[0].model} on {rows[0].ranks} ranks")
            groups.append(rows)
    return groups


def document(printed: str) -> str:
    """What was printed, as a page of the documentation."""
    lines = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    return f"""# ZeRO stages on mT5

{told_run("benchmarks.zero_study", sys.argv[1:])}

The first table is predicted, for nodes of eight A100s (`benchmarks/zero_study` has the figures
and their sources); the second is measured, small models on this machine. Stage 3 takes longer than
stage 2 at every number of nodes, as published (arXiv 2310.05350).

```text
{lines}
```
"""


def main(
    json_path: JsonPath = None,
    models: Annotated[str, typer.Option(help="Predicted, comma-separated.")] = ",".join(
        size.name for size in SIZES
    ),
    small: Annotated[str, typer.Option(help="Measured, comma-separated.")] = ",".join(
        size.name for size in SMALL
    ),
    rounds: Annotated[int, typer.Option(help="Of which the median counts.")] = ROUNDS,
    doc: DocPath = None,
) -> None:
    """Predicts large models and measures small ones; exits with 1 where stage 3 beats stage 2."""
    console = Console(record=True)
    console.width = max(console.width, WIDTH)
    results = study([s for s in SIZES if s.name in models.split(",")], console)
    complaints = []
    if results:
        console.print(results_table(results))
        by_key = {(r.model, r.stage, r.nodes): r for r in results}
        largest = results[-1].model
        complaints += [
            f"stage 3 is as fast as stage 2 for mT5 {largest} on {n} nodes"
            for n in NODES
            if by_key[largest, 2, n].step_s >= by_key[largest, 3, n].step_s
        ]
    groups = measured([s for s in SMALL if s.name in small.split(",")], rounds, console)
    if groups:
        console.print(measured_table(groups))
        complaints += [text for rows in groups for text in misses(rows)]
    for text in complaints:
        console.print(text)
    figures = {"predicted": results, "measured": [row for rows in groups for row in rows]}
    finish(
        console, not complaints, "", json_path=json_path, figures=figures, doc=doc,
        page=lambda: document(console.export_text()),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)

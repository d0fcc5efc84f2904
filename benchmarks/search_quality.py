"""`python -m benchmarks.search_quality`: whether the search finds what is best by its own model.

Where a job is small, every layout is planned in full, and the plan that the search gives is held
against the best of them. For the published rows of Narayanan et al. 2021 (arXiv 2104.04473) it is
held against the degrees that Megatron-LM was run with, by the same model and on the same devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from torch import nn

from benchmarks.fidelity.__main__ import BESIDE
from benchmarks.fidelity.data import FILES, NODE, Row, published_rows
from benchmarks.gpt import GPT, Shape
from benchmarks.harness import JsonPath, finish, rich_table
from merakc.costs.state import MIXED
from merakc.errors import MerakError
from merakc.frontend.record import Recording
from merakc.ir.batches import BatchLayout
from merakc.lowering.recording import record_part
from merakc.machines.cluster import Cluster, Hardware
from merakc.machines.cluster_files import hardware_for, preset
from merakc.planner.candidates import Candidates, find_candidates, open_strategies
from merakc.planner.choose import state_precision
from merakc.planner.offline import Recordings, plan_offline
from merakc.planner.piece_table import PieceTable
from merakc.planner.pricing import Shortage, job_of, outlook_of, price
from merakc.planner.request import Request
from merakc.planner.search import cut_layout, improve, with_memory
from merakc.planner.sources.source import Source

TOLERANCE = 0.01
RECOMPUTATIONS = ("auto", "none", "selective", "full", "stage")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds of the step that the search found, and of what it is held against."""

    name: str
    against: str
    found_s: float
    other_s: float
    layouts: int

    @property
    def passed(self) -> bool:
        """Whether the search is not beaten by more than the tolerance."""
        return self.found_s <= (1 + TOLERANCE) * self.other_s


def small_source(kind: str) -> Source:
    """A small model of transformers' on device meta, with its batches."""
    sizes = {
        "gpt2": {"n_embd": 512, "n_layer": 6, "n_head": 8, "vocab_size": 8192, "n_positions": 512},
        "llama": {
            "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6,
            "num_attention_heads": 8, "vocab_size": 8192, "max_position_embeddings": 512,
        },
    }[kind]  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, use_cache=False, **sizes)
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)

    def batch(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(samples, 512, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    return Source(kind, model.train(), batch)


def against_all(
    kind: str, ranks: int, batch_size: int, cluster: str, say: Callable[[str], None]
) -> Found:
    """The search against every layout, each planned in full."""
    machines = hardware_for(cluster, ranks).flat("float32")
    request = Request(ranks, 0, overlap=0, total_batch_size=batch_size)
    source = small_source(kind)
    best, _ = plan_offline(source, request, batch_size, machines)
    assert best.prediction is not None
    record = Recordings(source, request, lambda _: None)
    table, hardware = PieceTable(record, machines), machines.described(ranks)
    precision = state_precision(record, request)
    best_s, count = math.inf, 0
    for strategy in open_strategies(Candidates(table), request, hardware):
        job = job_of(table, strategy, hardware, precision)
        looked = outlook_of(job, request, hardware)
        priced = price(looked, request, hardware)
        if isinstance(priced, Shortage):
            continue
        count += 1
        say(f"{kind} on {ranks} devices: layout {count}")
        asked = request.decided(priced.strategy)
        best_s = min(best_s, *of_layout(request, asked, record, machines))
    name = f"{kind}, {ranks} x {cluster}"
    return Found(name, "all layouts", best.prediction.step_s, best_s, count)


def of_layout(
    request: Request, asked: Request, record: Recordings, machines: Cluster
) -> list[float]:
    """Seconds of a step with each kind of recomputation, in the best order; infinite where it does
    not fit.
    """
    found = [math.inf]
    try:
        cut = cut_layout(asked, record, machines)
    except MerakError:
        return found
    for recompute in RECOMPUTATIONS:
        try:
            fitted = with_memory(replace(asked, recompute=recompute), cut, machines)
            other = improve(replace(request, recompute=recompute), fitted, record, machines)
        except MerakError:
            continue
        assert other.prediction is not None
        if max(other.prediction.peak_bytes) <= machines.memory_bytes:
            found.append(other.prediction.step_s)
    return found


@cache
def gpt_record(shape: Shape, samples: int) -> Recording:
    """The forward of Megatron-LM's GPT in bfloat16."""
    with torch.device("meta"):
        model = GPT(shape).to(torch.bfloat16)
    ids = torch.zeros(samples, shape.seq_len, dtype=torch.long)
    layout = BatchLayout((samples, samples), 1)  # in parts, whatever their number
    return record_part(model, (ids, ids), {}, layout, CPU)


def roomy(hardware: Hardware) -> Hardware:
    """The same devices with memory for anything."""
    nodes = [replace(n, device=replace(n.device, memory_bytes=1 << 50)) for n in hardware.nodes]
    return replace(hardware, nodes=tuple(nodes))


def against_published(row: Row) -> Found:
    """The search against the degrees that were published, all else left to the search."""
    d = row.strategy
    hardware = preset("a100-80", -(-d.world_size // NODE))
    table = PieceTable(partial(gpt_record, row.shape), hardware.flat())
    batch_size = d.dp * row.micro_batch * d.micro_batches

    def find(request: Request, hardware: Hardware = hardware) -> Candidates:
        found = Candidates(table)
        find_candidates(found, request, hardware, MIXED)
        return found

    best = find(request=Request(d.world_size, 0, total_batch_size=batch_size))
    fixed = Request(
        d.world_size, 0, d.dp, tp=d.tp, pp=d.pp, micro_batches=d.micro_batches,
        schedule="interleaved-1f1b" if d.chunks > 1 else "1f1b",
        chunks=d.chunks if d.chunks > 1 else None,
        total_batch_size=batch_size,
    )  # fmt: skip
    against = f"dp {d.dp} tp {d.tp} pp {d.pp}"
    same = find(request=fixed)
    if not same.ranked:
        fixed = replace(fixed, recompute="full")
        same = find(request=fixed, hardware=roomy(hardware))
        against += ", memory aside"
    one = best.ranked[0].strategy
    return Found(
        f"{row.name}, {d.world_size} x a100-80: dp {one.dp} tp {one.tp} pp {one.pp}",
        against,
        best.ranked[0].estimate.step_s,
        same.ranked[0].estimate.step_s,
        best.looked_at,
    )


def all_found(data: Path, say: Callable[[str], None]) -> Iterator[Found]:
    """Everything that is held against something."""
    published = published_rows(data / FILES[2])["a100-80"]
    for kind, ranks, batch_size, cluster in (
        ("gpt2", 4, 16, "h100"), ("llama", 4, 16, "rtx-3090"), ("gpt2", 8, 16, "a100-40"),
    ):  # fmt: skip
        yield against_all(kind, ranks, batch_size, cluster, say)
    for row in published:
        if row.source == "Narayanan":
            say(f"{row.name} on {row.strategy.world_size} devices")
            yield against_published(row)


def main(
    data: Annotated[Path, typer.Option(help="The folder of the published rows.")] = BESIDE,
    json_path: JsonPath = None,
) -> None:
    """Compares; exits with 1 where something is more than one per cent better than the search."""
    console = Console(width=max(Console().width, 120))
    with console.status("") as status:
        found = list(all_found(data, status.update))
    body = [
        (
            one.name, one.against, f"{one.found_s:.4g}", f"{one.other_s:.4g}",
            f"[{'green' if one.passed else 'red'}]{one.found_s / one.other_s:.3f}[/]",
            str(one.layouts),
        )
        for one in found
    ]  # fmt: skip
    heads = ("job", "against", "found s", "that s", "ratio", "layouts")
    console.print(rich_table([heads, *body], left=2))
    finish(console, all(one.passed for one in found), "", json_path=json_path, figures=found)


if __name__ == "__main__":
    typer.run(main)

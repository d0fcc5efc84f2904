"""`python -m benchmarks.search_time`: seconds and memory to find a plan, cold, on one core.

Each search runs in a process of its own, bound to one core: importing torch and transformers,
building the model on device `meta`, recording, comparing, planning in full and writing the file.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness import JsonPath, finish, in_child, on_one_core, rich_table

MOST_BYTES = 2 << 30
CHILD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Case:
    """A model on so many devices of a preset, and the seconds that its plan may take."""

    source: str
    cluster: str
    ranks: int
    batch_size: int
    sequence: int
    most_s: float


@dataclass(frozen=True, slots=True)
class Search:
    """What a search took, `wall_s` from the start of its process, and what it found."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    step_s: float
    plan: str


CASES = (
    Case("gpt2", "h100", 8, 64, 1024, 5),
    Case("llama-3-8b", "h100", 64, 128, 8192, 15),
    Case("llama-3-70b", "h100", 1024, 1024, 8192, 45),
    Case("gpt3-175b", "a100-80", 4096, 1536, 2048, 60),
    Case("t5-11b", "h100", 64, 512, 512, 30),
)


def run_case(case: Case) -> Search:
    """Searches in a process of its own."""
    start_s = time.perf_counter()
    given = json.dumps(dataclasses.asdict(case))
    figures = in_child("benchmarks.search_time", "--child", given, timeout_s=CHILD_TIMEOUT_S)
    return Search(time.perf_counter() - start_s, **figures)


def search_here(case: Case) -> dict[str, object]:
    """The figures of this process with all that is imported, once the plan is written."""
    from merakc.cli.clusters import machines
    from merakc.ir.plan_file import PlanFile
    from merakc.ir.precision import parse_precision
    from merakc.planner.offline import plan_offline
    from merakc.planner.request import Request
    from merakc.planner.sources.source import load_source

    import torch  # isort: skip

    torch.set_num_threads(1)
    cluster = machines(case.cluster, "bfloat16", case.ranks)
    request = Request(case.ranks, 0, precision=parse_precision("bf16-mixed"))
    source = load_source(case.source, case.sequence or None)
    lowered, _ = plan_offline(source, request, case.batch_size, cluster)
    with tempfile.TemporaryDirectory() as folder:
        PlanFile(lowered.plan, lowered.prediction).save(Path(folder) / "plan.json")
    plan = lowered.plan
    assert lowered.prediction is not None
    return {
        "cpu_s": time.process_time(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "step_s": lowered.prediction.step_s,
        "plan": (
            f"dp {plan.dp} tp {plan.tp} pp {plan.pp}, {plan.micro_batches} micro-batches, "
            f"{plan.schedule}, recompute {plan.recompute}, shards {plan.shards(0)}"
        ),
    }


def searches_table(found: list[tuple[Case, Search]]) -> Table:
    """A row a case."""
    table = rich_table(
        [["model", "plan", "devices", "wall s", "at most", "CPU s", "peak MiB", "step s"]], left=2
    )
    for case, one in found:
        table.add_row(
            case.source, one.plan, f"{case.ranks:,} {case.cluster}", f"{one.wall_s:.1f}",
            f"{case.most_s:g}", f"{one.cpu_s:.1f}", f"{one.peak_bytes >> 20}", f"{one.step_s:.3g}",
            style=None if within(case, one) else "red",
        )  # fmt: skip
    return table


def within(case: Case, found: Search) -> bool:
    """Whether a search kept its limits."""
    return found.wall_s <= case.most_s and found.peak_bytes <= MOST_BYTES


def main(
    models: Annotated[str, typer.Option(help="Only these, separated by commas.")] = "",
    child: Annotated[str, typer.Option(hidden=True)] = "",
    json_path: JsonPath = None,
) -> None:
    """Times the searches; exits with 1 where one took longer or more memory than it may."""
    if child:
        print(json.dumps(on_one_core(partial(search_here, Case(**json.loads(child))))))
        return
    console = Console(width=max(Console().width, 150))
    wanted = [m for m in models.split(",") if m]
    found = []
    for case in CASES:
        if not wanted or case.source in wanted:
            with console.status(f"{case.source} on {case.ranks} devices"):
                found.append((case, run_case(case)))
    console.print(searches_table(found))
    rows = [{**dataclasses.asdict(c), **dataclasses.asdict(s)} for c, s in found]
    good = all(within(*pair) for pair in found)
    finish(console, good, f"{len(found)} searches", json_path=json_path, figures=rows)


if __name__ == "__main__":
    typer.run(main)

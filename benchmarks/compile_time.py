"""`python -m benchmarks.compile_time`: seconds and memory to compile models of 8B to 175B.

Each model is compiled for tp = 8 and pp = 8 in a process of its own, on device `meta`: no weight
is ever allocated, and the peak of resident memory is the compiler's own.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.harness import JsonPath, finish, in_child, rich_table
from merakc.ir.batches import BatchLayout
from merakc.ir.program import Mesh
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import make_plan
from merakc.lowering.recording import record_part
from merakc.machines.cluster import Cluster
from merakc.passes.sharding.shard import shard
from merakc.report.units import format_bytes, format_seconds

TP, PP = 8, 8
MICRO_BATCHES = 32
# Roughly a cluster of H100s; the plan depends on the ratios alone, its time on nothing of it.
CLUSTER = Cluster(
    name="h100",
    flops_per_s=4e14,
    bytes_per_s=2e12,
    op_overhead_s=4e-6,
    memory_bytes=80 * 2**30,
    link_latency_s=1e-5,
    link_bytes_per_s=5e10,
)
MAX_70B_BYTES = 3 * 2**29  # 1.5 GiB
MAX_70B_S = 60.0
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class CompileTime:
    """Seconds of each phase, nodes of the recorded graph, peak resident bytes of the process.

    `plan_s` is the whole of `make_plan`, which shards again before it cuts; `base_bytes` is what
    importing torch and transformers had taken before.
    """

    model: str
    build_s: float
    record_s: float
    shard_s: float
    plan_s: float
    nodes: int
    base_bytes: int
    peak_bytes: int

    @property
    def compile_s(self) -> float:
        """From the model to its plan."""
        return self.record_s + self.plan_s

    @property
    def within_limits(self) -> bool:
        """Whether the 70B model took less than its limits; nothing is asked of the others."""
        if self.model != "llama3-70b":
            return True
        return self.peak_bytes <= MAX_70B_BYTES and self.compile_s <= MAX_70B_S


def _llama(**sizes: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128256, num_key_value_heads=8, use_cache=False, **sizes
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _gpt3() -> nn.Module:
    config = transformers.GPT2Config(
        n_positions=2048, n_embd=12288, n_layer=96, n_head=96, use_cache=False
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


# (build, sequence length)
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "llama3-8b": (
        lambda: _llama(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=8192,
        ),
        8192,
    ),
    "llama3-70b": (
        lambda: _llama(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            max_position_embeddings=8192,
        ),
        8192,
    ),
    "gpt3-175b": (_gpt3, 2048),
}


def peak_resident_bytes() -> int:
    """The most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def measure(model: str) -> CompileTime:
    """Compiles one model in this process."""
    torch.set_num_threads(1)
    build, sequence = MODELS[model]
    base_bytes = peak_resident_bytes()
    start_s = time.perf_counter()
    with torch.device("meta"):
        built = build().to(torch.bfloat16).train()
    built_s = time.perf_counter()
    ids = torch.zeros(1, sequence, dtype=torch.long)
    layout = BatchLayout((MICRO_BATCHES,), MICRO_BATCHES)
    batch = {"input_ids": ids.expand(MICRO_BATCHES, -1), "labels": ids.expand(MICRO_BATCHES, -1)}
    recording = record_part(built, (), batch, layout, torch.device("cpu"))
    recorded_s = time.perf_counter()
    shard(recording.graph, TP)
    sharded_s = time.perf_counter()
    make_plan(recording, Strategy().on(Mesh(tp=TP, pp=PP), micro_batches=MICRO_BATCHES), CLUSTER)
    return CompileTime(
        model,
        build_s=built_s - start_s,
        record_s=recorded_s - built_s,
        shard_s=sharded_s - recorded_s,
        plan_s=time.perf_counter() - sharded_s,
        nodes=len(recording.graph.nodes),
        base_bytes=base_bytes,
        peak_bytes=peak_resident_bytes(),
    )


def measure_apart(model: str) -> CompileTime:
    """`measure` in a fresh process."""
    found = in_child("benchmarks.compile_time", "--one", model, timeout_s=TIMEOUT_S)
    return CompileTime(**found)


def times_table(results: list[CompileTime]) -> Table:
    """One column a model."""
    cells: dict[str, Callable[[CompileTime], str]] = {
        "nodes": lambda found: f"{found.nodes:,}",
        "build on meta": lambda found: format_seconds(found.build_s),
        "record": lambda found: format_seconds(found.record_s),
        "shard": lambda found: format_seconds(found.shard_s),
        "plan: shard and cut": lambda found: format_seconds(found.plan_s),
        "total: record and plan": lambda found: format_seconds(found.compile_s),
        "peak resident": lambda found: format_bytes(found.peak_bytes),
        "before the build": lambda found: format_bytes(found.base_bytes),
    }
    rows = [["", *(found.model for found in results)]]
    rows += [[name, *map(cell, results)] for name, cell in cells.items()]
    return rich_table(rows, title=f"Compilation for tp {TP} x pp {PP}")


def main(
    json_path: JsonPath = None,
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(MODELS),
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measures every model; exits with 1 where the 70B model exceeds its limits."""
    if one:
        print(json.dumps(dataclasses.asdict(measure(one))))
        return
    console = Console()
    results = []
    with console.status("") as status:
        for model in models.split(","):
            status.update(f"compiling {model}")
            results.append(measure_apart(model))
    console.print(times_table(results))
    good = all(found.within_limits for found in results)
    text = f"llama3-70b is allowed {MAX_70B_BYTES / 2**30:.1f} GiB and {MAX_70B_S:.0f} s"
    body = {"passed": good, "models": results}
    finish(console, good, text, json_path=json_path, figures=body)


if __name__ == "__main__":
    typer.run(main)

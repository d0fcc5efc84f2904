"""Steps of a causal model whose ranks exchange heads, or pass keys around, or gather them.

Llama over ranks of cp on one long text a step. The three train in turns within the same processes,
so that all meet what else the machine does: medians of the slowest rank's steps, and of what each
rank takes of the CPU, which other programs change less.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
import typer
from rich.console import Console

import merakc
from benchmarks.harness import rich_table
from benchmarks.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.sharding.sequences import heads, rings

# What exchanged bytes count beside gathered ones, and rings beside others, so that all are the one.
PRICES = {"gathered": (1e9, 1e9), "exchanged": (1e-3, 1e9), "passed around": (1e9, 1e-9)}


@dataclass(frozen=True)
class Sizes:
    """Of the model, and how many steps of each kind are timed behind two that are not."""

    tokens: int
    layers: int
    width: int
    heads: int
    groups: int
    steps: int


def _model(sizes: Sizes) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=sizes.width, intermediate_size=2 * sizes.width,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups, max_position_embeddings=sizes.tokens,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Step(NamedTuple):
    """Seconds of the slowest rank, those of the CPU by rank, and the loss."""

    took_s: float
    cpu_s: tuple[float, ...]
    loss: float


def _step(model: Any, ids: torch.Tensor) -> Step:
    dist.barrier()
    start_s, before_s = time.perf_counter(), time.process_time()
    loss = model(input_ids=ids, labels=ids)["loss"]
    loss.backward()
    own = torch.tensor([time.perf_counter() - start_s, time.process_time() - before_s])
    model.zero_grad()
    every = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    took_s, cpu_s = torch.stack(every).T.tolist()
    return Step(max(took_s), tuple(cpu_s), loss.item())


def measure(sizes: Sizes, ranks: int) -> dict[str, list[Step]]:
    """The steps of each kind, on one of the ranks."""
    ids = torch.randint(512, (1, sizes.tokens), generator=torch.Generator().manual_seed(0))
    batch, models = {"input_ids": ids, "labels": ids}, dict[str, Any]()
    for kind, price in PRICES.items():
        heads.EXCHANGE_PRICE, rings.RING_PRICE = price
        models[kind] = merakc.auto_parallel(
            _model(sizes), batch, dp=1, pp=1, cp=ranks, micro_batches=1, recompute="none",
            cluster=NOMINAL_CPU,
        )  # fmt: skip
        for _ in range(2):
            _step(models[kind], ids)
    found: dict[str, list[Step]] = {kind: [] for kind in models}
    for _ in range(sizes.steps):
        for kind, model in models.items():
            found[kind].append(_step(model, ids))
    return found


def main(
    tokens: Annotated[int, typer.Option(help="Of the one text of a step.")] = 4096,
    layers: Annotated[int, typer.Option()] = 4,
    width: Annotated[int, typer.Option(help="Of the hidden states.")] = 256,
    head_count: Annotated[int, typer.Option("--heads", help="Of queries.")] = 8,
    groups: Annotated[int, typer.Option(help="Heads of keys and values.")] = 8,
    ranks: Annotated[int, typer.Option(help="Of cp.")] = 2,
    steps: Annotated[int, typer.Option(help="Of each kind.")] = 11,
) -> None:
    """Prints the median seconds of a step of each kind, and the losses of the first."""
    sizes = Sizes(tokens, layers, width, head_count, groups, steps)
    found, *_ = run_ranks(ranks, partial(measure, sizes, ranks), timeout_s=3600.0)
    rows = [("", "median", "least", "of the CPU, by rank", "first loss")]
    for kind, own in found.items():
        seconds = [step.took_s for step in own]
        median, least = statistics.median(seconds), min(seconds)
        cpu = (statistics.median(of_rank) for of_rank in zip(*(s.cpu_s for s in own), strict=True))
        by_rank = " ".join(f"{cpu_s:.3f}" for cpu_s in cpu)
        loss = f"{own[0].loss:.6f}"
        rows.append((kind, f"{median:.3f} s", f"{least:.3f} s", f"{by_rank} s", loss))
    Console().print(rich_table(rows, title=f"{tokens} tokens over cp {ranks}"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)

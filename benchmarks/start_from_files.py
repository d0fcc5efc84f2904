"""`python -m benchmarks.start_from_files`: the host memory of ranks that start from safetensors.

A Llama of Llama-3-8B's widths and fewer layers, bfloat16, as fake files of real size (zeros that
take no room on the disk), starts at tp 2 x pp 2 on this machine. Each rank's peak is what it holds
beyond what it held before `auto_parallel`. Exits with 1 where one is above its shard, 10 % and
300 MB; where the model initialises itself, and one whole tensor.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import transformers
import typer
from rich.console import Console

import merakc
from benchmarks.harness import rich_table
from benchmarks.memory import resident_bytes
from benchmarks.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU

SHARE, BESIDE_BYTES = 1.1, 300 * 10**6
WAYS = ("from files", "meta, initialised", "from_pretrained", "from_pretrained on meta")
LAYOUT: dict[str, Any] = {"tp": 2, "pp": 2, "micro_batches": 2, "schedule": "1f1b"}


def config(layers: int) -> Any:
    """Llama-3-8B's, with so many layers."""
    return transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, use_cache=False, dtype="bfloat16",
    )  # fmt: skip


def empty(layers: int) -> Any:
    """The model, on the meta device."""
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config(layers)).bfloat16()


def fake_files(folder: Path, layers: int) -> int:
    """One sparse file of zeros as from `save_pretrained`; its bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in empty(layers).state_dict().items():
        shape, stop = list(tensor.shape), at + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(config(layers).to_json_string())
    return at


def started(way: str, folder: Path, layers: int, precision: str | None) -> tuple[float, int, int]:
    """Seconds until the model is there, the bytes of this rank's shard, and its peak."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, _ = resident_bytes()
    start_s = time.perf_counter()
    if way.startswith("from_pretrained"):
        where = {"device_map": "meta"} if way.endswith("meta") else {}
        of = transformers.LlamaForCausalLM
        plain = of.from_pretrained(folder, dtype=torch.bfloat16, **where).train()
    else:
        plain = empty(layers)
    files = {"weights": folder} if way in ("from files", "from_pretrained on meta") else {}
    model = merakc.auto_parallel(
        plain, {"input_ids": ids, "labels": ids}, cluster=NOMINAL_CPU, precision=precision,
        **files, **LAYOUT,
    )  # fmt: skip
    seconds, (_, peak) = time.perf_counter() - start_s, resident_bytes()
    each = 2 if precision is not None else 0  # the copies that are computed with
    shard_bytes = 0
    for tensor in model.state_dict(keep_vars=True).values():
        held = tensor.untyped_storage().nbytes()  # its shape is the whole tensor's
        shard_bytes += held + each * held // tensor.element_size()
    dist.barrier()
    return seconds, shard_bytes, peak - before


def main(
    layers: Annotated[int, typer.Option(help="4: two billion parameters.", min=1)] = 4,
    precision: Annotated[str | None, typer.Option(help="As auto_parallel's.")] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WAYS)}.")] = None,
) -> None:
    """Measure the ranks' peaks of every way to start."""
    console, failed = Console(), False
    with tempfile.TemporaryDirectory(prefix="merakc-start-") as place:
        size = fake_files(Path(place), layers)
        rows = [["", "rank", "s", "shard, MB", "peak, MB", "allowed, MB"]]
        largest = max(tensor.nbytes for tensor in empty(layers).parameters())
        for one in way or WAYS:
            run = partial(started, one, Path(place), layers, precision)
            for rank, (seconds, shard, peak) in enumerate(run_ranks(4, run, timeout_s=1800.0)):
                allowed = SHARE * shard + BESIDE_BYTES + (largest if one == WAYS[1] else 0)
                failed |= peak > allowed
                figures = (f"{value / 1e6:,.0f}" for value in (shard, peak, allowed))
                rows.append([one, str(rank), f"{seconds:.1f}", *figures])
    title = f"{size / 2e9:.2f} billion parameters, tp 2 x pp 2"
    console.print(rich_table(rows, title=title))
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)

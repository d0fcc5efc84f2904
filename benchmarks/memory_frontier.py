"""`python -m benchmarks.memory_frontier`: a step's CPU seconds over its peak memory.

Every row runs in a process of its own, one thread a rank: GPT-2 with dropout, Llama, T5, ViT and a
U-Net on one rank, by eager torch with and without its checkpointing, and by merakc's kinds of
recomputation and budgets; GPT-2 on two pipeline ranks, and on two of tp, by merakc alone. Memory is
what is resident above the model, gradients included, at most, in all steps behind the first.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import merakc
from benchmarks.harness import JsonPath, finish, in_child
from benchmarks.memory import resident_bytes
from benchmarks.models import Batch
from benchmarks.ranks import run_ranks
from benchmarks.zoo_models.plain_vision import UNet
from merakc.ir.recompute import parse_budget
from merakc.machines.cluster import NOMINAL_CPU

EAGER = ("eager", "eager, checkpointing")
KINDS = (*EAGER, "none", "selective", "0.5", "0.25", "full")
# Behind a colon the axis of several ranks: there eager torch has no row.
MODELS = ("gpt2", "llama", "t5", "vit", "unet", "gpt2:pp2", "gpt2:tp2")
ONE_RANK = {"micro_batches": 1}
SAMPLES, TOKENS, WORDS, LAYERS, HIDDEN, SIDE = 4, 512, 2048, 24, 256, 128
STEPS = 3
TIMEOUT_S = 3600.0
CLEAR = Path("/proc/self/clear_refs")
MIB = 2**20


def build(name: str) -> tuple[nn.Module, Batch]:
    """The model in train mode, and its batch."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=draw) for _ in range(2)]
    images = torch.randn(2 * SAMPLES, 3, SIDE, SIDE, generator=draw)
    if name == "unet":
        pixels = torch.randint(0, 4, (2 * SAMPLES, SIDE, SIDE), generator=draw)
        return UNet(32, 4).train(), {"pixel_values": images, "labels": pixels}
    sizes: dict[str, Any] = {
        "gpt2": {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": 4, "n_positions": TOKENS},
        "llama": {
            "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 688,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        "t5": {
            "num_layers": LAYERS // 2, "d_model": HIDDEN, "d_kv": HIDDEN // 4, "num_heads": 4,
            "d_ff": 4 * HIDDEN, "decoder_start_token_id": 0,
        },
        "vit": {
            "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 4,
            "intermediate_size": 4 * HIDDEN, "image_size": SIDE, "patch_size": 8, "num_labels": 16,
        },
    }[name]  # fmt: skip
    config: Any = transformers.AutoConfig.for_model(
        name, **sizes, **({} if name == "vit" else {"vocab_size": WORDS, "use_cache": False})
    )
    if name == "vit":
        labels = torch.randint(0, 16, (2 * SAMPLES,), generator=draw)
        model = transformers.AutoModelForImageClassification.from_config(config)
        return model.train(), {"pixel_values": images, "labels": labels}
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    labels = texts[1] if name == "t5" else texts[0]
    return kind.from_config(config).train(), {"input_ids": texts[0], "labels": labels}


def measure(name: str, kind: str, layout: str = "") -> dict[str, Any]:
    """A row: CPU seconds of the fastest step, peak bytes above the model, what was predicted; of
    several ranks the sums over them, and the largest.
    """
    options: dict[str, int] = {layout[:2]: int(layout[2:]), "micro_batches": 4} if layout else {}
    if layout:
        ranks = run_ranks(options[layout[:2]], _measured, name, kind, options)
    else:
        ranks = [_measured(name, kind, ONE_RANK)]
    seconds, peaks, predicted = zip(*ranks, strict=True)
    return {
        "model": " ".join(filter(None, (name, layout))), "kind": kind, "cpu_s": sum(seconds),
        "peak_bytes": max(peaks), "predicted_bytes": max(predicted),
    }  # fmt: skip


def _measured(name: str, kind: str, options: dict[str, int]) -> tuple[float, int, int]:
    """What `measure` says of one rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made, batch = build(name)
    model: Any = made
    predicted = 0
    if kind == EAGER[1]:
        model.gradient_checkpointing_enable()
    if kind not in EAGER:
        recompute = float(kind) if parse_budget(kind) else kind
        model = merakc.auto_parallel(
            model, batch, recompute=recompute, cluster=NOMINAL_CPU, **options
        )
        if options == ONE_RANK:
            own = sum(p.numel() * p.element_size() for p in model.parameters())
            predicted = max(model.plan_file.prediction.peak_bytes) - 3 * own
    base = resident_bytes()[0]
    seconds, peaks = [], []
    for _ in range(STEPS + 1):
        model.zero_grad()
        CLEAR.write_text("5")
        start = time.process_time()
        out = model(**batch)
        (out["loss"] if isinstance(out, dict) else out.loss).backward()
        seconds.append(time.process_time() - start)
        peaks.append(resident_bytes()[1] - base)
    return min(seconds[1:]), max(peaks[1:]), predicted


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows, for people."""
    made = Table("model", "recompute", "CPU a step", "peak above the model", "predicted")
    for row in rows:
        predicted = f"{row['predicted_bytes'] / MIB:,.0f} MiB" if row["predicted_bytes"] else "-"
        peak = f"{row['peak_bytes'] / MIB:,.0f} MiB"
        made.add_row(row["model"], row["kind"], f"{row['cpu_s']:.2f} s", peak, predicted)
    return made


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(MODELS),
    kinds: Annotated[str, typer.Option(help="Separated by semicolons.")] = ";".join(KINDS),
    row: Annotated[bool, typer.Option(help="One row, here, as JSON.")] = False,
    json_path: JsonPath = None,
) -> None:
    """Measure each model with each kind of recomputation."""
    if row:
        name, _, layout = models.partition(":")
        sys.stdout.write(json.dumps(measure(name, kinds, layout)) + "\n")
        return
    rows = []
    for name in models.split(","):
        for kind in kinds.split(";"):
            if (kind in EAGER and ":" in name) or (kind == EAGER[1] and name == "unet"):
                continue
            options = "--row", "--models", name, "--kinds", kind
            rows.append(in_child("benchmarks.memory_frontier", *options, timeout_s=TIMEOUT_S))
    console = Console()
    console.print(table(rows))
    finish(console, True, f"{len(rows)} rows", json_path=json_path, figures=rows)


if __name__ == "__main__":
    typer.run(main)

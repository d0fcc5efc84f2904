"""`python -m benchmarks.memory_frontier`: a step's CPU seconds over its peak memory, on one rank.

Every row runs in a process of its own, one thread: a GPT-2 with dropout and a Llama, by eager torch
with and without its checkpointing, and by merakc's kinds of recomputation and budgets. Memory is
what is resident above the model, gradients included, at most, in all steps behind the first.
"""

from __future__ import annotations

import json
import subprocess
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
from benchmarks.harness import JsonPath, finish
from merakc.ir.recompute import parse_budget
from merakc.machines.cluster import NOMINAL_CPU

EAGER = ("eager", "eager, checkpointing")
KINDS = (*EAGER, "none", "selective", "0.5", "0.25", "full")
MODELS = ("gpt2", "llama")
SAMPLES, TOKENS, WORDS, LAYERS, HIDDEN = 4, 512, 2048, 24, 256
STEPS = 3
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 2**20


def build(name: str) -> nn.Module:
    """The model in train mode."""
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            n_layer=LAYERS, n_embd=HIDDEN, n_head=4, n_positions=TOKENS, vocab_size=WORDS,
            use_cache=False,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=688, vocab_size=WORDS,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


def resident_bytes(what: str) -> int:
    """`VmRSS` as it is, or `VmHWM`, the most since it was cleared."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def measure(name: str, kind: str) -> dict[str, Any]:
    """A row: CPU seconds of the fastest step, peak bytes above the model, what was predicted."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = build(name)
    ids = torch.randint(0, WORDS, (SAMPLES, TOKENS))
    batch, predicted = {"input_ids": ids, "labels": ids}, 0
    if kind == EAGER[1]:
        model.gradient_checkpointing_enable()
    if kind not in EAGER:
        recompute = float(kind) if parse_budget(kind) else kind
        model = merakc.auto_parallel(
            model, batch, micro_batches=1, recompute=recompute, cluster=NOMINAL_CPU
        )
        own = sum(p.numel() * p.element_size() for p in model.parameters())
        predicted = max(model.plan_file.prediction.peak_bytes) - 3 * own
    base = resident_bytes("VmRSS")
    seconds, peaks = [], []
    for _ in range(STEPS + 1):
        model.zero_grad()
        CLEAR.write_text("5")
        start = time.process_time()
        model(**batch).loss.backward()
        seconds.append(time.process_time() - start)
        peaks.append(resident_bytes("VmHWM") - base)
    return {
        "model": name, "kind": kind, "cpu_s": min(seconds[1:]), "peak_bytes": max(peaks[1:]),
        "predicted_bytes": predicted,
    }  # fmt: skip


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
        sys.stdout.write(json.dumps(measure(models, kinds)) + "\n")
        return
    rows = []
    for name in models.split(","):
        for kind in kinds.split(";"):
            command = [sys.executable, "-m", "benchmarks.memory_frontier", "--row"]
            command += ["--models", name, "--kinds", kind]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    console = Console()
    console.print(table(rows))
    finish(console, True, f"{len(rows)} rows", json_path=json_path, figures=rows)


if __name__ == "__main__":
    typer.run(main)

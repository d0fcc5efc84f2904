"""Which contestants train in which layouts, all on the same 1,024 tokens a step, and what of them
can be had here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.environments import (
    Environment,
    MissingPeerError,
    accelerate_environment,
    deepspeed_environment,
)
from benchmarks.peers.rounds import Entry
from benchmarks.peers.training import Training
from benchmarks.reports import told_run

SAMPLES = 8  # of a step, over all ranks
# dp, tp, pp and the micro-batches of each copy of the model. Pipelines run one sample at a time;
# without one there is nothing to gain from parts.
PLANS: dict[str, tuple[int, int, int, int]] = {
    "dp2": (2, 1, 1, 1),
    "tp2": (1, 2, 1, 1),
    "pp2": (1, 1, 2, 8),
    "pp4": (1, 1, 4, 8),
    "dp2tp2": (2, 2, 1, 1),
    "dp2pp2": (2, 1, 2, 4),
    "tp2pp2": (1, 2, 2, 8),
}
MERAKC, ALONE, ACCELERATE, DEEPSPEED = "merakc", "one process", "Accelerate", "DeepSpeed"
# Of merakc without oneDNN, to tell what comes of it.
TORCHS = f"{MERAKC}, torch's products"
# What an adapter needs beside torch and transformers.
NEEDS = {
    "accelerate_ddp": ACCELERATE,
    "hf_trainer": ACCELERATE,
    "deepspeed_zero": DEEPSPEED,
    "deepspeed_pipeline": DEEPSPEED,
}
# Systems that were looked at and have no adapter, and why.
ABSENT = {
    "Megatron-Core": "asks for CUDA devices by name; the Megatron-style baseline stands for it",
    "ColossalAI": "asks for CUDA devices by name, and for an older torch",
    "nnScaler": "asks for an older torch and transformers",
    "Merak": "asks for an older torch and transformers, and trains GPT-2 only in this form",
    "Galvatron": "does not import without CUDA",
    "Alpa": "is for JAX",
}


def training_of(plan: str, base: Training) -> Training:
    """The training in a layout of `PLANS`, with the sizes of `base`."""
    dp, tp, pp, micro_batches = PLANS[plan]
    return replace(
        base, ranks=dp * tp * pp, tp=tp, pp=pp, micro_batches=micro_batches, samples=SAMPLES // dp
    )


def entries(training: Training) -> list[Entry]:
    """The contestants of a layout, merakc first."""
    found = [Entry("merakc_plan", "auto", MERAKC), Entry("merakc_plan", "torchs-products", TORCHS)]
    if training.tp > 1:
        found.append(Entry("merakc_plan", "overlap-2", f"{MERAKC}, overlap=2"))
    for threads in sorted({1, min(training.ranks, os.cpu_count() or 1)}):
        form = "1 thread" if threads == 1 else f"{threads} threads"
        found.append(Entry("one_process", form, f"{ALONE}, {form}", alone=True))
    if training.pp > 1:
        return found + _pipelines(training)
    found.append(Entry("megatron_style", "none", "Megatron-style"))
    if training.tp > 1:
        label = "DTensor + FSDP2" if training.dp > 1 else "DTensor parallelize_module"
        return [*found, Entry("dtensor_tp", "tp", label)]
    return [
        *found,
        Entry("torch_ddp", "zero-0", "DDP"),
        Entry("fsdp2", "zero-3", "FSDP2"),
        Entry("accelerate_ddp", "ddp", "Accelerate"),
        Entry("hf_trainer", "ddp", "Trainer"),
        Entry("deepspeed_zero", "zero-0", "DeepSpeed ZeRO-0"),
        Entry("deepspeed_zero", "zero-1", "DeepSpeed ZeRO-1"),
    ]


def _pipelines(training: Training) -> list[Entry]:
    added = "".join([" + DTensor" if training.tp > 1 else "", " + DDP" if training.dp > 1 else ""])
    found = [
        Entry("megatron_style", "none", "Megatron-style 1F1B"),
        Entry("torch_pipeline", "Schedule1F1B", f"torch 1F1B{added}"),
    ]
    if training.dp == training.tp == 1:
        found += [
            Entry("megatron_style", "selective", "Megatron-style 1F1B, selective recompute"),
            Entry("megatron_style", "full", "Megatron-style 1F1B, full recompute"),
            Entry("torch_pipeline", "ScheduleInterleaved1F1B", "torch interleaved"),
            Entry("torch_pipeline", "ScheduleZBVZeroBubble", "torch ZBV"),
            Entry("torch_tracer", "Schedule1F1B", "torch 1F1B, its tracer"),
        ]
    if training.tp == 1:
        found.append(Entry("deepspeed_pipeline", "1f1b", "DeepSpeed pipeline"))
    return found


def chosen(found: Sequence[Entry], peers: str) -> list[Entry]:
    """Those of the modules named, comma-separated, and always merakc; all where none is named."""
    names = {"merakc_plan", *filter(None, peers.split(","))}
    return [entry for entry in found if not peers or entry.peer in names]


def make_environments(
    needed: set[str], cache: Path
) -> tuple[dict[str, Environment], dict[str, str]]:
    """By adapter those that need one, and by package why one is missing."""
    makers = {ACCELERATE: accelerate_environment, DEEPSPEED: deepspeed_environment}
    found, missing = {}, {}
    for name, make in makers.items():
        if name not in needed:
            continue
        try:
            made = make(cache.expanduser())
        except MissingPeerError as error:
            missing[name] = str(error)
            continue
        if made is not None:
            found |= {peer: made for peer, need in NEEDS.items() if need == name}
    return found, missing


def about(
    module: str, training: Training, tokens: str, environments: Mapping[str, Environment],
    wall_s: float,
) -> str:  # fmt: skip
    """The command, the date, the machine, the versions, the sizes; `tokens` are those of a step."""
    size = sum(p.numel() for p in training.model().parameters())
    versions = {f" {NEEDS[peer]} {found.version}." for peer, found in environments.items()}
    return (
        f"{told_run(module, sys.argv[1:])}{''.join(sorted(versions))} {wall_s:.0f} s in all.\n\n"
        f"A Llama of {size / 1e6:.1f} million parameters ({training.layers} layers, hidden "
        f"{training.hidden}, vocabulary {training.vocabulary}) in float32 with AdamW, "
        f"{tokens}, gloo."
    )

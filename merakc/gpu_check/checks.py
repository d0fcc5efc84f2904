"""What is checked on a machine's GPUs, by name: each runs in a process of its own.

A CUDA error ends a process's context: what runs beside or after it must not suffer from that.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from merakc.files.printable import count_of
from merakc.gpu_check import sanitize, speed
from merakc.gpu_check.equal import allowed, compare
from merakc.gpu_check.models import MODELS
from merakc.gpu_check.ops import check_attention, check_scaled, check_scores

Room = Literal["kernels", "equality", "speed"]
# What changes which calls run in one process, and layouts of several ranks; each of one model.
OPTIONS: dict[str, dict[str, Any]] = {
    "four micro-batches": {"micro_batches": 4},
    "all recomputed": {"recompute": "full"},
    "activations on the host": {"offload": "activations"},
    "optimizer on the host": {"offload": "optimizer"},
    "parameters on the host": {"offload": "parameters"},
    "compiled": {"compile": True, "dtype": "float32"},
    "compiled, all recomputed": {"compile": True, "recompute": "full", "dtype": "float32"},
    "float32": {"dtype": "float32"},
    "a bfloat16 model": {"dtype": "bfloat16"},
    "bf16-mixed": {"model": "gpt2", "precision": "bf16-mixed", "dtype": "float32"},
    "fp16-mixed": {"precision": "fp16-mixed", "dtype": "float32"},
    "measured": {"cluster": None, "dtype": "float32"},
    "loss in blocks": {"whole_scores_bytes": 0, "dtype": "float32"},
}
LAYOUTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("llama", 2, {"pp": 2, "micro_batches": 4}),
    ("llama", 2, {"pp": 2, "micro_batches": 4, "schedule": "zb-h1"}),
    ("llama", 2, {"tp": 2}),
    ("llama", 2, {"tp": 2, "whole_scores_bytes": 0, "dtype": "float32"}),
    ("gpt2", 2, {"tp": 2, "overlap": 2, "micro_batches": 1}),
    ("bert", 2, {"tp": 2, "sequence_parallel": True}),
    ("gpt2", 2, {"dp": 2, "state_shards": "zero-3"}),
    ("llama", 2, {"dp": 2, "state_shards": "zero-1", "precision": "bf16-mixed",
                  "dtype": "float32"}),
    ("t5", 4, {"pp": 2, "dp": 2, "micro_batches": 2}),
    ("mixtral", 4, {"tp": 2, "pp": 2, "micro_batches": 2}),
    ("mixtral", 2, {"ep": 2}),
    ("llama", 4, {"cp": 2, "tp": 2}),
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """Something to be checked: the name of one of `RUN`, its arguments, and the most seconds."""

    room: Room
    name: str
    runs: str
    arguments: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 180.0


@dataclass(frozen=True)
class Found:
    """How a check ended: whether all is right, in a line, and what else there is to know."""

    room: Room
    name: str
    ok: bool
    text: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


def all_checks(device: str, gpus: int) -> Iterator[Check]:
    """Those of a machine with so many GPUs, or of its CPU; those that are timed come last."""
    yield Check("kernels", "attention", "attention", {"device": device})
    yield Check("kernels", "losses in blocks", "scores", {"device": device})
    yield Check("kernels", "products of float8", "scaled", {"device": device})
    if device == "cuda":
        yield Check("kernels", "compute-sanitizer", "sanitizer", limit_s=300.0)
    for name in MODELS:
        yield Check("equality", f"{name}: float64", "equality", {"model": name, "device": device})
    for name, options in OPTIONS.items():
        given = {"model": "llama", "device": device, **options}
        yield Check("equality", f"{given['model']}: {name}", "equality", given)
    for name, ranks, options in LAYOUTS:
        where = (
            f"{count_of(ranks, 'rank')}"
            if device == "cpu" or gpus >= ranks
            else f"{count_of(ranks, 'rank')}, one GPU"
        )
        told = ", ".join(f"{key}={value}" for key, value in options.items())
        given = {"model": name, "ranks": ranks, "device": device, "dp": 1, "tp": 1, "pp": 1}
        yield Check("equality", f"{name}: {told} ({where})", "equality", given | options)
    for kind in speed.KINDS:
        yield Check("speed", kind, "speed", {"kind": kind, "device": device}, limit_s=240.0)


def _wrong(lines: list[str]) -> tuple[bool, str, dict[str, Any]]:
    return not lines, lines[0] if lines else "as the formulas", {"wrong": lines}


def _equality(model: str, **options: Any) -> tuple[bool, str, dict[str, Any]]:
    errors, limit = compare(model, **options), allowed(**options)
    worst = max(errors, key=lambda kind: errors[kind])
    text = f"{errors[worst]:.1e} of {worst}, {limit:.0e} is allowed"
    return errors[worst] <= limit, text, dict(errors)


def _speed(kind: str, device: str) -> tuple[bool, str, dict[str, Any]]:
    figures = speed.run(kind, torch.device(device))
    return True, f"{figures['step_s'] * 1e3:.1f} ms a step", figures


RUN: dict[str, Callable[..., tuple[bool, str, dict[str, Any]]]] = {
    "attention": lambda device: _wrong(check_attention(torch.device(device))),
    "scores": lambda device: _wrong(check_scores(torch.device(device))),
    "scaled": lambda device: _wrong(check_scaled(torch.device(device))),
    "sanitizer": lambda: _wrong(sanitize.found()),
    "equality": _equality,
    "speed": _speed,
}


def run(check: Check) -> Found:
    """Runs a check here; what it raises is how it ended."""
    start_s = time.perf_counter()
    try:
        ok, text, figures = RUN[check.runs](**check.arguments)
    except Exception as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        text = f"{type(error).__name__}: {lines[-1] if lines else ''}"
        ok, figures = False, {"traceback": traceback.format_exc()[-6000:]}
    return Found(check.room, check.name, ok, text, time.perf_counter() - start_s, figures)


if __name__ == "__main__":
    # A process of its own is given what to check, and where to write how it ended.
    asked = Check(**json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(asdict(run(asked))), encoding="utf-8")

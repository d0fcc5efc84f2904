"""A step of a large model beside torch's own: eager, and compiled; and beside what is predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType

from merakc.api import auto_parallel
from merakc.frontend.opaque import default_dtype
from merakc.gpu_check.models import Batch, large_llama
from merakc.runtime.streams import wait_for

KINDS = ("eager", "torch.compile", "merakc", "merakc, compiled")
STEPS, WARM = 10, 3
LARGE_BYTES = 60 << 30  # of memory, for 16 layers and two sequences


def run(kind: str, device: torch.device) -> dict[str, Any]:
    """What a kind of step takes: seconds and bytes, and the kernels of a step on a GPU."""
    model, batch, figures = _made(device)
    begin_s = time.perf_counter()
    if kind == "torch.compile":
        model = torch.compile(model)  # type: ignore[assignment]
    elif kind != "eager":
        made = auto_parallel(
            model, batch, device=device, dp=1, tp=1, pp=1, micro_batches=1, recompute="none",
            compile=kind != "merakc",
        )  # fmt: skip
        model, prediction = made, made.plan_file.prediction
        assert prediction is not None
        figures |= {"predicted_s": prediction.step_s, "predicted_bytes": prediction.peak_bytes[0]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(then: Callable[[], None] = lambda: None) -> None:
        model(**batch).loss.backward()
        then()
        optimizer.step()
        optimizer.zero_grad()

    step()
    wait_for(device)
    figures["ready_s"] = time.perf_counter() - begin_s
    figures |= _timed(step, device)
    figures["tokens_per_s"] = figures["tokens"] / figures["step_s"]
    return figures | (_on_device(step) if device.type == "cuda" else {})


def _made(device: torch.device) -> tuple[nn.Module, Batch, dict[str, Any]]:
    """The model in bfloat16, a batch, and what is known of both."""
    small = device.type != "cuda"
    large = not small and torch.cuda.get_device_properties(device).total_memory > LARGE_BYTES
    layers, samples, length = (2, 1, 64) if small else (16, 2, 4096) if large else (8, 1, 2048)
    torch.manual_seed(0)
    with default_dtype(torch.bfloat16), device:
        model, words = large_llama(layers, small=small)
    ids = torch.randint(0, words, (samples, length), device=device)
    figures = {
        "layers": layers, "samples": samples, "length": length, "tokens": samples * length,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    return model.train(), {"input_ids": ids, "labels": ids}, figures


def _timed(step: Callable[..., None], device: torch.device) -> dict[str, Any]:
    """Median seconds of a step, and of its part before the optimizer; the most bytes."""
    for _ in range(WARM):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    whole, passes = [], []
    for k in range(2 * STEPS):
        wait_for(device)
        begin_s = time.perf_counter()

        def then(begin_s: float = begin_s) -> None:
            wait_for(device)
            passes.append(time.perf_counter() - begin_s)

        step(then) if k % 2 else step()
        wait_for(device)
        if not k % 2:
            whole.append(time.perf_counter() - begin_s)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"step_s": median(whole), "least_s": min(whole), "most_s": max(whole),
            "pass_s": median(passes), "peak_bytes": peak}  # fmt: skip


def _on_device(step: Callable[[], None]) -> dict[str, Any]:
    """The kernels of a step: how many, their seconds by name, and those of nothing at all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        step()
        torch.cuda.synchronize()
    ran = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in found.events()
        if e.device_type == DeviceType.CUDA and "#" not in e.name
    )  # fmt: skip
    kernels: dict[str, list[float]] = {}
    for start, end, name in ran:
        own = kernels.setdefault(name[:100], [0, 0.0])
        own[0] += 0.5
        own[1] += (end - start) / 2e6
    idle_s = sum(max(0.0, b[0] - a[1]) for a, b in pairwise(ran)) / 2e6
    return {
        "kernels": len(ran) // 2, "busy_s": sum(s for _, s in kernels.values()), "idle_s": idle_s,
        "most": sorted(kernels.items(), key=lambda item: -item[1][1])[:30],
    }  # fmt: skip

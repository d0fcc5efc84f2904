"""A step of a large model beside torch's own: eager, and compiled."""

from __future__ import annotations

import cProfile
import fcntl
import io
import json
import pstats
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from merakc.api import auto_parallel
from merakc.gpu_check.models import large_llama

STEPS, WARM = 8, 3
LOCK = "/tmp/merakc-gpu.lock"  # one is timed at a time


def timed(step: Callable[[], Any], steps: int = STEPS, warm: int = WARM) -> dict[str, float]:
    """Seconds of the first step and of a later one, the median; the most bytes of the device."""
    for _ in range(warm):
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds, host = [], []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        step()
        host.append(time.perf_counter() - begin_s)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin_s)
    peak = torch.cuda.max_memory_allocated()
    return {
        "step_s": median(seconds), "host_s": median(host), "peak_bytes": peak,
        "least_s": min(seconds),
    }  # fmt: skip


def profiled(step: Callable[[], Any]) -> dict[str, Any]:
    """The kernels of two steps, by name: how many and how long."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    ran = []
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "#" not in event.name:
            ran.append((event.time_range.start, event.time_range.end, event.name[:70]))
            own = kernels.setdefault(event.name[:110], [0, 0.0])
            own[0] += 1
            own[1] += event.device_time if hasattr(event, "device_time") else event.cuda_time
    ran.sort()
    gaps = [
        (later[0] - earlier[1], earlier[2], later[2])
        for earlier, later in pairwise(ran) if later[0] > earlier[1]
    ]  # fmt: skip
    top = sorted(kernels.items(), key=lambda item: -item[1][1])
    return {
        "kernels": sum(int(n) for n, _ in kernels.values()),
        "idle_s": sum(us for us, *_ in gaps) / 1e6,
        "gaps": sorted(gaps, reverse=True)[:25],
        "busy_s": sum(us for _, us in kernels.values()) / 1e6,
        "top": [(name, int(n), us / 1e3) for name, (n, us) in top[:45]],
    }


def on_host(step: Callable[[], Any], steps: int = 3) -> list[str]:
    """Where the host's time of a step goes: the functions that take most of it themselves."""
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(steps):
        step()
        torch.cuda.synchronize()
    watch.disable()
    text = io.StringIO()
    pstats.Stats(watch, stream=text).sort_stats("tottime").print_stats(30)
    return [line for line in text.getvalue().splitlines() if line.strip()]


def run(kind: str, layers: int, samples: int, length: int, out: str, **options: Any) -> None:
    """Times one kind of step, and writes what it found."""
    device = torch.device("cuda:0")
    build, words = large_llama(layers)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model: nn.Module = build().train()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(0, words, (samples, length), device=device)
    batch = {"input_ids": ids, "labels": ids}
    found: dict[str, Any] = {"kind": kind, "options": options, "layers": layers,
                             "samples": samples, "length": length,
                             "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip
    begin_s = time.perf_counter()
    if kind == "compiled":
        model = torch.compile(model)  # type: ignore[assignment]
    elif kind == "merakc":
        model = auto_parallel(model, batch, device=device, **options)
        predicted = model.plan_file.prediction
        assert predicted is not None
        found["predicted_s"], found["predicted_bytes"] = predicted.step_s, predicted.peak_bytes[0]
    found["made_s"] = time.perf_counter() - begin_s
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    begin_s = time.perf_counter()
    step()
    torch.cuda.synchronize()
    found["first_s"] = time.perf_counter() - begin_s
    with open(LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found |= timed(step)
        found["pass"] = timed(lambda: model(**batch).loss.backward())
        optimizer.zero_grad()
        Path(out).write_text(json.dumps(found))
        found["host"] = on_host(step)
        found["profile"] = profiled(step)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    name, layers, samples, length, path, *more = sys.argv[1:]
    run(name, int(layers), int(samples), int(length), path, **json.loads(more[0] if more else "{}"))

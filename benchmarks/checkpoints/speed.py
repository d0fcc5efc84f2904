"""What a save and a load take, beside torch's own, of 100 million parameters on two ranks."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import merakc
from benchmarks.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2 zero-1": {"dp": 2, "state_shards": "zero-1"},
}  # fmt: skip
VOCABULARY = 20_000
Figures = dict[str, tuple[float, float]]  # seconds, and bytes of memory beyond those before


def _memory_bytes() -> tuple[int, int]:
    """What this process holds now, and the most since `_forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(found["VmRSS"]) << 10, int(found["VmHWM"]) << 10


def _timed(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds, and the most memory beyond what was held before."""
    seconds, peaks = [], []
    for _ in range(repeats):
        dist.barrier()
        os.sync()
        Path("/proc/self/clear_refs").write_text("5")
        before, _ = _memory_bytes()
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
        peaks.append(_memory_bytes()[1] - before)
    return statistics.median(seconds), max(peaks)


def _trained(layout: dict[str, Any]) -> tuple[merakc.ParallelModel, torch.optim.Optimizer]:
    """A GPT-2 after a step."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=768, n_layer=12, n_head=12, vocab_size=VOCABULARY, n_positions=64,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(VOCABULARY, (4, 32))
    batch = {"input_ids": ids, "labels": ids}
    plain = transformers.GPT2LMHeadModel(config)
    model = merakc.auto_parallel(plain, batch, cluster=NOMINAL_CPU, **layout)
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def measured(layout: dict[str, Any], place: Path, repeats: int) -> tuple[float, Figures]:
    """The bytes of a rank's shard of weights and state, and the figures of each way."""
    model, optimizer = _trained(layout)
    shard_bytes = 3 * sum(p.nbytes for p in model.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    warnings.simplefilter("ignore")  # torch's, of its own code

    def own() -> dict[str, Any]:
        weights, state = get_state_dict(model, optimizer, options=options)
        return {"model": weights, "optimizer": state}

    def dcp_load() -> None:
        dcp.load(state := own(), checkpoint_id=place / "dcp")
        set_state_dict(
            model, optimizer, model_state_dict=state["model"],
            optim_state_dict=state["optimizer"], options=options,
        )  # fmt: skip

    def torch_save() -> None:
        """Whole weights on rank 0 alone, with as much state beside them, to the disk."""
        full = model.full_state_dict()
        if dist.get_rank() == 0:
            state = {k: [torch.zeros_like(v), torch.zeros_like(v)] for k, v in full.items()}
            with (place / "run.pt").open("wb") as file:
                torch.save({"model": full, "optimizer": state}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def later() -> None:
        waiting.append(merakc.save(place / "later", model, optimizer, wait=False))

    waiting: list[merakc.Saving] = []
    found: Figures = {
        "merakc save": _timed(lambda: merakc.save(place / "c", model, optimizer), repeats)
    }
    found["merakc load"] = _timed(lambda: merakc.load(place / "c", model, optimizer), repeats)
    later()
    waiting.pop().wait()
    times = []
    for _ in range(repeats):
        times.append(_timed(later, 1)[0])
        waiting.pop().wait()
    found["merakc save, wait=False"] = statistics.median(times), 0.0
    found["torch DCP save"] = _timed(lambda: dcp.save(own(), checkpoint_id=place / "dcp"), repeats)
    found["torch DCP load"] = _timed(dcp_load, repeats)
    found["torch.save of all on rank 0"] = _timed(torch_save, repeats)
    return shard_bytes, found


def figures(repeats: int) -> dict[str, tuple[float, Figures]]:
    """Of each layout: the largest of the ranks' figures."""
    found = {}
    for name, layout in LAYOUTS.items():
        place = Path(tempfile.mkdtemp(prefix="merakc-speed-"))
        try:
            ranks = run_ranks(2, partial(measured, layout, place, repeats), timeout_s=600.0)
        finally:
            shutil.rmtree(place)
        largest = {
            key: (max(f[key][0] for _, f in ranks), max(f[key][1] for _, f in ranks))
            for key in ranks[0][1]
        }
        found[name] = max(shard for shard, _ in ranks), largest
    return found

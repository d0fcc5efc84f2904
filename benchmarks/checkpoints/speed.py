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
from benchmarks.memory import resident_bytes
from benchmarks.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2 zero-1": {"dp": 2, "state_shards": "zero-1"},
}  # fmt: skip
VOCABULARY = 20_000
SAVE, LOAD, LATER = "merakc save", "merakc load", "merakc save, wait=False"
DCP_SAVE, DCP_LOAD = "torch DCP save", "torch DCP load"
COPY = "a copy of the shard in memory"
NOISE, BEYOND = 1.05, 0.1  # of torch's seconds; of the shard
LATER_S = 0.05  # beyond the copy, which wait=False cannot do without
Figures = dict[str, tuple[float, float]]  # seconds, and bytes of memory beyond those before


def _timed(work: Callable[[Path], object], place: Path) -> tuple[float, float]:
    """Seconds of work on a place, and the most memory beyond what was held before."""
    os.sync()
    Path("/proc/self/clear_refs").write_text("5")
    before, _ = resident_bytes()
    dist.barrier()  # last, so that no rank's wait for another's `sync` counts
    start_s = time.perf_counter()
    work(place)
    return time.perf_counter() - start_s, resident_bytes()[1] - before


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


def measured(layout: dict[str, Any], place: Path, repeats: int) -> tuple[int, Figures]:
    """The bytes of a rank's shard of weights and state, and the figures of each way."""
    model, optimizer = _trained(layout)
    shard_bytes = 3 * sum(p.nbytes for p in model.parameters())
    warnings.simplefilter("ignore")  # torch's, of its own code
    waiting: list[merakc.Saving] = []
    ways = _ways(model, optimizer, waiting)
    ways[LATER][1](place / "first")
    waiting.pop().wait()  # the memory that the next ones copy to
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for k in range(repeats):  # in turns, so that what else the machine does falls on all
        (folder := place / str(k)).mkdir(exist_ok=True)  # as for every step, a new one
        for name, (file, work) in ways.items():
            times[name].append(_timed(work, folder / file))
            if waiting:
                waiting.pop().wait()
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    found = {
        name: (statistics.median(s for s, _ in runs), max(b for _, b in runs))
        for name, runs in times.items()
    }
    return shard_bytes, found


def _ways(
    model: merakc.ParallelModel, optimizer: torch.optim.Optimizer, waiting: list[merakc.Saving]
) -> dict[str, tuple[str, Callable[[Path], object]]]:
    """What is timed, with the name of what it writes or reads; what goes on after goes to
    `waiting`.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def own() -> dict[str, Any]:
        weights, state = get_state_dict(model, optimizer, options=options)
        return {"model": weights, "optimizer": state}

    def dcp_load(place: Path) -> None:
        dcp.load(state := own(), checkpoint_id=place)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"],
            optim_state_dict=state["optimizer"], options=options,
        )  # fmt: skip

    def copy(_: Path) -> None:
        for source, to in copies:
            to.copy_(source)

    state = (t for s in optimizer.state.values() for t in s.values() if t.dim())
    held = [getattr(t, "local", t.detach()) for t in (*model.parameters(), *state)]
    copies = [(t, t.clone()) for t in held]
    return {
        SAVE: ("c", lambda place: merakc.save(place, model, optimizer)),
        LOAD: ("c", lambda place: merakc.load(place, model, optimizer)),
        LATER: (
            "later", lambda p: waiting.append(merakc.save(p, model, optimizer, wait=False))
        ),
        COPY: ("", copy),
        DCP_SAVE: ("dcp", lambda place: dcp.save(own(), checkpoint_id=place)),
        DCP_LOAD: ("dcp", dcp_load),
        "torch.save of all on rank 0": ("run.pt", partial(_torch_save, model)),
    }  # fmt: skip


def _torch_save(model: merakc.ParallelModel, place: Path) -> None:
    """Whole weights on rank 0 alone, with as much state beside them, to the disk."""
    full = model.full_state_dict()
    if dist.get_rank() == 0:
        state = {k: [torch.zeros_like(v), torch.zeros_like(v)] for k, v in full.items()}
        with place.open("wb") as file:
            torch.save({"model": full, "optimizer": state}, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()


def problems(shard_bytes: int, found: Figures) -> list[str]:
    """Which promises a layout's figures break: torch's own is as fast, or memory is over."""
    told = []
    for ours, peer in ((SAVE, DCP_SAVE), (LOAD, DCP_LOAD)):
        if found[ours][0] > NOISE * found[peer][0]:
            told.append(f"{ours} takes {found[ours][0]:.2f} s, {peer} {found[peer][0]:.2f} s")
        if found[ours][1] > BEYOND * shard_bytes:
            told.append(f"{ours} holds {found[ours][1]:,} bytes beyond {shard_bytes:,}")
    if found[LATER][0] > found[COPY][0] + LATER_S:
        told.append(f"{LATER} takes {found[LATER][0]:.3f} s, {COPY} {found[COPY][0]:.3f} s")
    return told


def figures(repeats: int) -> dict[str, tuple[int, Figures]]:
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

"""Fine-tuning of a part: adapters of peft, frozen backbones and embeddings, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn

import merakc
from benchmarks.layouts import Task, train_layout, worst_difference
from benchmarks.models import MODELS, Batch, ModelCase
from benchmarks.ranks import run_ranks
from benchmarks.reference import split_batch, step_batch, train_reference
from merakc.costs.work.sharded import OPTIMIZER_STATES
from merakc.equality.casts import lifted_casts
from merakc.equality.compare import Reference, optimizer_for
from merakc.ir.program import Mesh
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.part import plain as held_part
from merakc.runtime.shards import Bucket
from merakc.train.model import ParallelModel

# peft asks transformers by a name that transformers will drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

RANK, SAMPLES, PARTS, STEPS = 2, 8, 4, 2
BOUND = 1e-10

# A gradient, and what the optimizer keeps of it: what a frozen parameter does not need.
TRAINING_COPIES = 1 + OPTIMIZER_STATES


def _changed(name: str, change: Callable[[nn.Module], nn.Module]) -> ModelCase:
    case = MODELS[name]
    return replace(case, build=lambda dropout: change(case.build(dropout)))


def _lora(name: str, **options: Any) -> ModelCase:
    """Adapters whose second half is not zero at the start, as it would be after training."""
    config = peft.LoraConfig(r=RANK, lora_dropout=0.0, init_lora_weights=False, **options)
    return _changed(name, lambda model: peft.get_peft_model(model, config))


def _frozen(name: str, *parts: str) -> ModelCase:
    def freeze(model: nn.Module) -> nn.Module:
        for part in parts:
            model.get_submodule(part).requires_grad_(False)
        return model

    return _changed(name, freeze)


CASES = {
    "lora, llama": _lora("llama", target_modules="all-linear"),
    # Its projections are stored the other way round, three of them in one.
    "lora, gpt2": _lora(
        "gpt2", target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True
    ),
    "lora and a whole head, bert": _lora(
        "bert", target_modules=["query", "value"], modules_to_save=["cls"]
    ),
    "frozen embeddings, gpt2": _frozen("gpt2", "transformer.wte", "transformer.wpe"),
    "frozen and tied, llama": _frozen("llama_tied", "model.embed_tokens"),
    "frozen backbone, llama": _frozen("llama", "model"),
    "frozen middle, t5": _frozen("t5", "encoder"),
}  # fmt: skip
# Each in the layout that has most to do with what is special about it.
LAYOUTS = {
    "lora, llama": Mesh(tp=2),
    "lora, gpt2": Mesh(tp=2),
    "lora and a whole head, bert": Mesh(pp=2),
    "frozen embeddings, gpt2": Mesh(dp=2),
    "frozen and tied, llama": Mesh(pp=2),
    "frozen backbone, llama": Mesh(pp=2),  # a stage trains nothing
    "frozen middle, t5": Mesh(pp=2),
}


@cache
def _reference(name: str) -> Reference:
    return train_reference(
        CASES[name], batch_size=SAMPLES, micro_batches=PARTS, steps=STEPS, lift_casts=True
    )


@cache
def _results(name: str, mesh: Mesh) -> list[Reference]:
    task = Task(CASES[name], mesh, SAMPLES, PARTS, STEPS, lift_casts=True, cluster=NOMINAL_CPU)
    return run_ranks(mesh.world_size, train_layout, task)


@pytest.mark.parametrize(("name", "mesh"), LAYOUTS.items(), ids=str)
def test_a_part_is_trained_as_in_one_process(name: str, mesh: Mesh) -> None:
    results = _results(name, mesh)
    losses = [result.losses for result in results]
    found = worst_difference(results[0], losses, _reference(name), BOUND)
    assert found.error < BOUND, found
    for ours, plain in zip(results[0].gradients, _reference(name).gradients, strict=True):
        assert ours.keys() == plain.keys()


@dataclass(frozen=True)
class _Held:
    """What one rank holds, and what its step did."""

    leads: bool  # is the first of its tp ranks
    trained: int  # elements
    frozen: int
    peak_bytes: int  # as predicted
    with_gradient: set[str]
    with_state: set[str]
    requiring: set[str]
    reduced: int  # elements of gradients that other ranks were asked for


def _elements(model: ParallelModel, *, trained: bool) -> int:
    own = (p for p in model.parameters() if p.requires_grad is trained)
    return sum(held_part(p).numel() for p in own)


def _peak_bytes(model: ParallelModel, mesh: Mesh) -> int:
    assert model.plan_file.prediction is not None
    return model.plan_file.prediction.peak_bytes[mesh.coordinates(dist.get_rank())[1]]


def _made(case: ModelCase, mesh: Mesh, *, train_all: bool) -> tuple[ParallelModel, Batch]:
    """The model and the batch of one rank; with `train_all` nothing is frozen."""
    model = case.model(torch.float64)
    for parameter in model.parameters():
        parameter.requires_grad_(train_all or parameter.requires_grad)
    batch = split_batch(step_batch(case, SAMPLES, torch.float64, 0), mesh.dp)[0]
    parallel = merakc.auto_parallel(
        model, batch, dp=mesh.dp, tp=mesh.tp, pp=mesh.pp, micro_batches=PARTS // mesh.dp,
        schedule="1f1b", recompute="none", state_shards="zero-0", cluster=NOMINAL_CPU,
    )  # fmt: skip
    return parallel, batch


def _step(case: ModelCase, mesh: Mesh) -> tuple[_Held, int, int]:
    """One step on one rank; and the elements and predicted bytes of it where nothing is frozen."""
    reduced: list[int] = []
    plain_reduce = Bucket.reduce

    def reduce(bucket: Bucket, *, last: bool) -> Iterator[dist.Work]:
        reduced.append(bucket.total if last else 0)
        return plain_reduce(bucket, last=last)

    Bucket.reduce = reduce  # type: ignore[method-assign]  # in this rank, a process of its own
    with lifted_casts():
        parallel, batch = _made(case, mesh, train_all=False)
        optimizer = optimizer_for(parallel)
        parallel(**batch)["loss"].backward()
        optimizer.step()
        everything, _ = _made(case, mesh, train_all=True)
    assert _elements(everything, trained=False) == 0
    held = dict(parallel.named_parameters())
    own = _Held(
        mesh.coordinates(dist.get_rank())[2] == 0,
        _elements(parallel, trained=True),
        _elements(parallel, trained=False),
        _peak_bytes(parallel, mesh),
        {n for n, p in held.items() if p.grad is not None},
        {n for n, p in held.items() if p in optimizer.state},
        {n for n, p in held.items() if p.requires_grad},
        sum(reduced),
    )
    return own, _elements(everything, trained=True), _peak_bytes(everything, mesh)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("frozen embeddings, gpt2", Mesh(dp=2)),
        ("lora, gpt2", Mesh(tp=2)),
        ("frozen and tied, llama", Mesh(pp=2)),
    ],
    ids=str,
)
def test_frozen_weights_take_no_gradient_no_optimizer_memory_and_no_reduction(
    name: str, mesh: Mesh
) -> None:
    """And the predicted memory has neither of them."""
    plain = dict(CASES[name].model().named_parameters())
    trained = {n for n, p in plain.items() if p.requires_grad}
    frozen = sum(p.numel() for n, p in plain.items() if n not in trained)
    ranks = run_ranks(mesh.world_size, _step, CASES[name], mesh)
    assert set().union(*(rank.requiring for rank, *_ in ranks)) == trained
    for rank, elements, peak_bytes in ranks:
        assert rank.with_gradient == rank.with_state == rank.requiring
        assert 0 < rank.frozen <= (frozen if mesh.tp == 1 else 0.6 * frozen)
        assert rank.reduced == (rank.trained if mesh.dp > 1 else 0)
        assert elements == rank.trained + rank.frozen
        if rank.leads:  # a plan predicts for the first tp rank
            saved_bytes = peak_bytes - rank.peak_bytes
            assert saved_bytes >= TRAINING_COPIES * rank.frozen * torch.float64.itemsize


def test_the_trained_weights_are_pefts_and_can_be_merged() -> None:
    case = CASES["lora, llama"]
    weights = _results("lora, llama", LAYOUTS["lora, llama"])[0].weights
    ours, plain = case.model(torch.float64), case.model(torch.float64)
    assert weights.keys() == ours.state_dict().keys()
    start = peft.get_peft_model_state_dict(plain)
    ours.load_state_dict(weights)
    plain.load_state_dict(_reference("lora, llama").weights)
    adapters = peft.get_peft_model_state_dict(ours)
    assert adapters.keys() == start.keys()
    assert len(adapters) == 2 * 7 * 4  # two matrices for each of seven projections of four layers
    for key, value in adapters.items():
        assert not torch.equal(value, start[key]), key
    merged, wanted = (m.merge_and_unload().state_dict() for m in (ours, plain))
    assert merged.keys() == MODELS["llama"].model().state_dict().keys()
    for key, value in wanted.items():
        torch.testing.assert_close(merged[key], value, rtol=1e-10, atol=1e-12)

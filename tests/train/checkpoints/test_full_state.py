"""torch's `full_state_dict=True`: the whole run in plain tensors, which any plan and none takes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import merakc
from benchmarks.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.checkpoints.full_state import leaves_of, put
from tests.battery.small_models import Tensors, Words, build, first_part, part, warm_up, words
from tests.train.checkpoints.test_saving import LAYOUTS, ranks_of


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    batch = words(seed)
    model(**(part(batch, model) if hasattr(model, "plan") else batch))["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


def taken_back(layout: dict[str, Any]) -> dict[bool, tuple[Any, Any, Tensors]]:
    """By whether it is offloaded: the state after two steps, as rank 0 gets it, and the weights
    after a third, which is made again from that state after another.
    """
    dp = layout.get("dp", 1)
    model = merakc.auto_parallel(
        build(Words), first_part(words(0), dp), cluster=NOMINAL_CPU, **layout
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    states = {}
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        states[offload] = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        if offload and model.rank:
            assert states[offload] == ({}, {})
    kept = copy.deepcopy(states)
    step(model, optimizer, 2)
    wanted = model.full_state_dict()
    for offload, (weights, state) in states.items():
        step(model, optimizer, 3)
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=offload, broadcast_from_rank0=offload
        )
        set_model_state_dict(model, weights, options=options)
        set_optimizer_state_dict(model, optimizer, state, options=options)
        step(model, optimizer, 2)
        for name, value in model.full_state_dict().items():
            assert torch.equal(value, wanted[name]), (offload, name)
    return {offload: (*kept[offload], wanted) for offload in kept}


@pytest.mark.parametrize("name", ["zero3", "tp2 pp2"])
def test_one_process_goes_on_with_it(name: str) -> None:
    found = run_ranks(ranks_of(LAYOUTS[name]), partial(taken_back, LAYOUTS[name]))
    for weights, state, _ in (*(of_rank[False] for of_rank in found), found[0][True]):
        model = build(partial(Words), seed=9)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        step(model, optimizer, 2)
        for key, value in model.state_dict().items():
            wanted = found[0][False][2][key]
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10, msg=key)


def test_dicts_with_numbers_for_keys_stay_dicts() -> None:
    state = {"a": {0: {"x": 1}, 1: [{"y": 2}, []]}, "b": [[1], {}]}
    found: dict[str, Any] = {}
    for path, leaf in leaves_of(state, ()):
        put(found, path, leaf)
    assert found == state

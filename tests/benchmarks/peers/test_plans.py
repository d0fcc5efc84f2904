from __future__ import annotations

import importlib.util

import pytest

from benchmarks.peers.plans import NEEDS, PLANS, chosen, entries, training_of
from benchmarks.peers.training import Training


@pytest.mark.parametrize("plan", PLANS)
def test_all_layouts_train_on_the_same_tokens(plan: str) -> None:
    training = training_of(plan, Training())
    assert training.dp * training.tp * training.pp == training.ranks
    assert training.tokens == 8 * 128
    assert training.alone().tokens == training.tokens
    assert training.samples % training.micro_batches == 0
    found = entries(training)
    assert found[0].peer == "merakc_plan"
    assert len({entry.label for entry in found}) == len(found)
    assert any(entry.alone for entry in found)
    assert any(entry.peer == "megatron_style" for entry in found)
    for entry in found:
        assert importlib.util.find_spec(f"benchmarks.peers.{entry.peer}") is not None


def test_peers_can_be_chosen() -> None:
    found = entries(training_of("dp2", Training()))
    peers = [e.peer for e in chosen(found, "fsdp2")]
    assert peers == ["merakc_plan", "merakc_plan", "fsdp2"]
    assert chosen(found, "") == found
    assert {e.peer for e in found if e.peer in NEEDS} == {
        "accelerate_ddp", "hf_trainer", "deepspeed_zero"
    }  # fmt: skip

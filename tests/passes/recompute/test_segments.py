"""What backwards make again: the same bits, from less that is kept."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from merakc.costs.work.memory import order_bytes
from merakc.ir.program import ActionKind, StageGraphs
from merakc.ir.recompute import Keep, Run, run_of
from merakc.passes.autodiff.recompute import KEPT_BY_SELECTIVE
from merakc.passes.pipeline import called_pieces, uniform
from merakc.passes.recompute.blocks import find_blocks, in_place
from merakc.passes.recompute.segments import recomputed, stretched
from tests.passes.autodiff.test_recompute import STAGES, lowered, values
from tests.passes.autodiff.test_rematerialise import both

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD


@cache
def plain(name: str, stage: int) -> StageGraphs:
    return called_pieces(lowered(name).stages.local[stage])


def held_bytes(stage: StageGraphs) -> int:
    return order_bytes(stage, (FORWARD, BACKWARD))[0].held_bytes


def at_random(blocks: int, seed: int) -> tuple[Run, ...]:
    draw, runs = random.Random(seed), []
    while blocks:
        run = Run(draw.choice(list(Keep)), draw.randint(1, min(blocks, 4)))
        runs.append(run)
        blocks -= run.blocks
    return tuple(runs)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "resnet", "whisper", "mixtral"])
def test_the_same_bits_whatever_blocks_keep(name: str) -> None:
    for stage in range(STAGES):
        whole = plain(name, stage)
        given = values(whole.forward)
        wanted = both(whole, given)
        count = len(find_blocks(in_place(whole.forward)))
        choices = [at_random(count, seed) for seed in range(3)]
        for runs in (uniform(whole, "full"), uniform(whole, "selective"), *choices):
            less = recomputed(whole, runs)
            less.verify()
            found = both(less, given)
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                assert torch.equal(found[key].nan_to_num(), value.nan_to_num()), (key, runs)


@pytest.mark.parametrize(("name", "share"), [("gpt2", 0.5), ("llama", 0.6), ("t5", 0.7)])
def test_layers_made_again_are_not_kept(name: str, share: float) -> None:
    whole = plain(name, 0)
    full, products = (recomputed(whole, uniform(whole, how)) for how in ("full", "selective"))
    assert held_bytes(full) < share * held_bytes(whole)
    assert held_bytes(full) < held_bytes(products) < held_bytes(whole)
    assert products.backward is not None
    again = [n for n in products.backward.nodes if run_of(n.name) is not None]
    assert again
    assert not [n for n in again if n.op in KEPT_BY_SELECTIVE]


def test_runs_for_another_number_of_blocks_are_stretched() -> None:
    runs = Run(Keep.KEPT, 1), Run(Keep.AGAIN, 1), Run(Keep.PRODUCTS, 2)
    assert stretched(runs, 4) == runs
    assert stretched(runs, 8) == (Run(Keep.KEPT, 2), Run(Keep.AGAIN, 2), Run(Keep.PRODUCTS, 4))
    assert sum(run.blocks for run in stretched(runs, 3)) == 3

"""Collectives over dp in Programs: what is gathered ahead, waited for and reduced where."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.models import MODELS
from merakc.analysis.buckets import Held, plan_buckets
from merakc.frontend.record import record
from merakc.ir.program import Action, ActionKind, CollectiveKind, Mesh, Program
from merakc.ir.state import StateShards, lattice
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.programs.collectives import (
    Touch,
    rank_buckets,
    rough_touches,
    stage_touches,
    trained,
    with_collectives,
)
from merakc.simulation.faults import verify_programs
from tests.recorded import one_of_several

F, B, I, W, R = (  # noqa: E741 - the field's own letters
    ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD,
    ActionKind.RECOMPUTE,
)  # fmt: skip
REDUCE = ActionKind.REDUCE


def reads(*names: str) -> tuple[Touch, ...]:
    return tuple(Touch(n, False, f"on_{n}", k / 4) for k, n in enumerate(names))


def makes(*names: str) -> tuple[Touch, ...]:
    return tuple(Touch(n, True, f"of_{n}", (k + 1) / 4) for k, n in enumerate(names))


def placed(*counts: int, actions: list[Action], shared: str = "", fetched: bool = False) -> str:
    """Buckets a, b, c; a compute reads them in that order, a backward the other way round."""
    held = [
        Held(
            n, torch.float32, 1, (0, 1)[: 1 + (n in shared)], True, n in shared,
            on_host=fetched, fetched=fetched,
        )
        for n in "abc"
    ]  # fmt: skip
    backward = (*reads("c"), *makes("c"), *reads("b", "a"), *makes("b", "a"))
    touches = {(F, True): reads(*"abc"), (F, False): reads(*"abc"), (R, True): reads(*"abc"),
               (B, True): backward, (B, False): backward, (I, False): reads(*"cba"),
               (W, False): makes(*"cba")}  # fmt: skip
    buckets = plan_buckets(held, lambda _: StateShards(*counts), bucket_bytes=1)
    program = Program(0, (*actions, Action(REDUCE, 0)))
    return "\n".join(
        a.text for a in with_collectives(program, {0: touches}, buckets, "abc").actions
    )


TWO = [Action(F, 0), Action(B, 0), Action(F, 0, 1), Action(B, 0, 1)]


def test_unsharded_gradients_are_reduced_after_the_last_micro_batch() -> None:
    assert placed(1, 1, 1, actions=TWO) == (
        "0F0\n0B0\n0F1\n0B1 [reduce 0:2 @ of_c, reduce 0:1 @ of_b, reduce 0:0 @ of_a]\nreduce 0"
    )


def test_what_the_optimizer_wrote_is_gathered_with_the_step() -> None:
    assert placed(1, 4, 4, actions=TWO) == (
        "gather 0 [refresh 0:0, refresh 0:1, refresh 0:2]\n"
        "0F0 [wait 0:0 @ on_a, wait 0:1 @ on_b, wait 0:2 @ on_c]\n"
        "0B0 [scatter 0:2 @ of_c, scatter 0:1 @ of_b, scatter 0:0 @ of_a]\n"
        "0F1\n"
        "0B1 [reduce 0:2 @ of_c, reduce 0:1 @ of_b, reduce 0:0 @ of_a]\n"
        "reduce 0"
    )


def test_sharded_parameters_are_gathered_one_bucket_ahead() -> None:
    assert placed(4, 4, 4, actions=TWO[:2]) == (
        "gather 0 [gather 0:0]\n"
        "0F0 [wait 0:0 @ on_a, gather 0:1 @ on_a, wait 0:1 @ on_b, gather 0:2 @ on_b, "
        "wait 0:2 @ on_c]\n"
        # c is still there from the forward, and so is b behind it
        "0B0 [reduce 0:2 @ of_c, wait 0:1 @ on_b, gather 0:0 @ on_b, wait 0:0 @ on_a, "
        "reduce 0:1 @ of_b, reduce 0:0 @ of_a]\n"
        "reduce 0"
    )


def test_parameters_of_the_host_are_fetched_two_buckets_ahead() -> None:
    assert placed(1, 1, 1, actions=TWO[:2], fetched=True) == (
        "gather 0 [gather 0:0, gather 0:1]\n"
        "0F0 [wait 0:0 @ on_a, gather 0:2 @ on_a, wait 0:1 @ on_b, wait 0:2 @ on_c]\n"
        # all are still there
        "0B0 [reduce 0:2 @ of_c, wait 0:1 @ on_b, wait 0:0 @ on_a, reduce 0:1 @ of_b, "
        "reduce 0:0 @ of_a]\n"
        "reduce 0"
    )


def test_shared_parameters_are_reduced_last() -> None:
    assert placed(1, 1, 1, actions=TWO[:2], shared="ab") == (
        "0F0\n0B0 [reduce 0:0 @ of_c]\nreduce 0 [reduce 0+1:0, reduce 0+1:1]"
    )


def test_split_backwards_and_recomputation() -> None:
    order = [Action(F, 0), Action(F, 0, 1), Action(I, 0), Action(I, 0, 1), Action(W, 0),
             Action(W, 0, 1)]  # fmt: skip
    text = placed(1, 4, 4, actions=order)
    assert "0I0\n0I1\n0W0 [scatter 0:2 @ of_c, " in text
    assert "0W1 [reduce 0:2 @ of_c, " in text
    again = placed(4, 4, 4, actions=[Action(F, 0), Action(R, 0), Action(B, 0)])
    assert "0R0 [wait 0:0 @ on_a, gather 0:1 @ on_a" in again


def test_a_forward_alone_reduces_nothing() -> None:
    assert placed(4, 4, 4, actions=TWO[:1]).count("reduce") == 1


@cache
def lowered(pp: int, shards: StateShards, schedule: str = "1f1b", dp: int = 4) -> Lowered:
    case = MODELS["gpt2"]
    recording = one_of_several(case.model(), case.batch(2))
    found = make_plan(
        recording,
        Strategy().on(Mesh(dp=dp, pp=pp), micro_batches=4, schedule=schedule),
        NOMINAL_CPU,
    )
    plan = found.plan
    plan = replace(plan, state_shards=(shards,) * len(plan.rank_of))
    return replace(found, plan=plan)


@pytest.mark.parametrize("shards", list(lattice(4)), ids=str)
def test_each_bucket_is_gathered_before_it_is_read_and_reduced_once(shards: StateShards) -> None:
    found = lowered(2, shards)
    programs = found.with_collectives(found.programs())
    verify_programs(programs)
    for program in programs:
        rank = found.plan.mesh.coordinates(program.rank)[1]
        buckets = {b.name: b for b in rank_buckets(found.plan, found.stages.local)[rank]}
        ready: set[str] = set()
        seen: Counter[CollectiveKind] = Counter()
        shares = []
        for action in program.actions:
            shares = [c.share for c in action.collectives]
            assert shares == sorted(shares)
            for c in action.collectives:
                seen[c.kind] += 1
                if c.kind in (CollectiveKind.REFRESH, CollectiveKind.GATHER):
                    ready.add(c.bucket)
                elif c.kind is CollectiveKind.WAIT:
                    assert c.bucket in ready
        assert seen[CollectiveKind.REDUCE] == len(buckets)
        wrote = shards.optimizer > shards.parameters
        assert seen[CollectiveKind.REFRESH] == (len(buckets) if wrote else 0)
        assert (seen[CollectiveKind.GATHER] > 0) == (shards.parameters > 1)
        assert (seen[CollectiveKind.SCATTER] > 0) == (shards.gradients > 1)


def test_rough_touches_are_those_of_the_pieces() -> None:
    """The same parameters in about the same order, in every kind of compute."""
    found = lowered(2, StateShards(), "zb-h1", 1)
    chunk = found.stage_graphs(0, 0)
    real, rough = stage_touches(chunk), rough_touches(found.stages.local[0])
    wanted = trained(found.loss.graph)
    of_forward = [[t.parameter for t in found[F, False]] for found in (real, rough)]
    assert of_forward[0] == of_forward[1]
    for kind in (B, W):
        made, roughly_made = (
            {t.parameter for t in touches[kind, False] if t.is_gradient}
            for touches in (real, rough)
        )
        assert made == roughly_made == wanted & set(of_forward[0])
    backward = [t.parameter for t in real[B, False] if t.is_gradient]
    roughly = [t.parameter for t in rough[B, False] if t.is_gradient]
    apart = [abs(backward.index(n) - roughly.index(n)) for n in backward]
    assert max(apart) <= 3
    assert not [t for t in real[I, False] if t.is_gradient]


def test_what_only_a_mask_reads_is_not_trained() -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bound = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).masked_fill(self.bound > 0, 0.0).sum()

    assert trained(record(Masked(), (torch.ones(2, 3),), {}).graph) == {"weight"}

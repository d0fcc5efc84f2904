"""One planner: what is left open never costs, and everyone is told the same of a plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import merakc
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from merakc.ir.plan import Plan
from merakc.lowering.predict import predict
from merakc.machines.cluster import NOMINAL_CPU, NOMINAL_GPU, Cluster, Sharing
from merakc.machines.cluster_files import hardware_for
from merakc.planner.choose import choose, compare
from merakc.planner.offline import plan_offline
from merakc.planner.piece_table import PieceTable
from merakc.planner.request import Request
from merakc.planner.search import Record
from merakc.planner.sources.source import Source, load_source
from merakc.planner.what_if import simulated
from merakc.report.analysis import make_report
from tests.recorded import one_of_several

CLUSTERS: dict[str, Callable[[int], Cluster]] = {
    "cores": lambda _: NOMINAL_CPU,
    "few cores": lambda _: replace(NOMINAL_CPU, sharing=Sharing((1.0, 0.9), 4)),
    "GPUs": lambda _: NOMINAL_GPU,
    "h100": lambda ranks: hardware_for("h100", ranks).flat("float32"),
    "rtx-4090": lambda ranks: hardware_for("rtx-4090", ranks).flat("float32"),
}
# Of chains of requests, in each of which 9 arguments are dropped one after the other: with these
# there are decoders and an encoder, tp and four stages, chunks, cores and several kinds of GPUs.
CHAINS = (1, 5, 6, 22, 112)
# The same for a mixture, whose ranks share experts at first.
MIXTURES = (0, 2)
SAME = 1 + 1e-9


@cache
def record(kind: str) -> Record:
    case = MODELS[kind]
    return cache(lambda samples: one_of_several(case.model(), case.batch(samples)))


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def fixed(rng: random.Random, ranks: int, samples: int) -> dict[str, Any]:
    """Values for all that a request may leave open."""
    pairs = [(dp, tp) for dp in divisors(ranks) for tp in divisors(ranks // dp)]
    dp, tp = rng.choice([d for d in pairs if ranks // d[0] // d[1] <= 4 and samples % d[0] == 0])
    pp = ranks // dp // tp
    schedules = ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved-1f1b"]
    return {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "micro_batches": rng.choice(divisors(samples // dp)),
        "schedule": rng.choice(schedules) if pp > 1 else "1f1b",
        "recompute": rng.choice(["none", "full", "selective"]),
        "sequence_parallel": rng.choice([True, False]),
        "state_shards": rng.choice(["zero-0", "zero-1", "zero-2", "zero-3"]),
        "overlap": 0,
    }


def freer(request: Request, names: list[str]) -> Iterator[tuple[str, Request]]:
    """The request, and after it each that leaves one of these open more."""
    yield "nothing", request
    for name in names:
        # With a degree of tp, cp that is left open is 1.
        gone = ("tp", "cp", "expert_parallel") if name == "cp" else (name,)
        defaults = {n: Request.__dataclass_fields__[n].default for n in gone}
        request = replace(request, **defaults)
        yield name, request


@pytest.mark.parametrize("seed", CHAINS)
def test_a_freer_request_is_never_worse(seed: int) -> None:
    rng = random.Random(seed)
    kind, machines = rng.choice(["gpt2", "llama", "t5", "bert"]), rng.choice([*CLUSTERS])
    ranks, samples = rng.choice([2, 4, 4, 8]), rng.choice([8, 16, 24])
    check_chain(rng, kind, machines, Request(ranks, 0, total_batch_size=samples),
                fixed(rng, ranks, samples))  # fmt: skip


@pytest.mark.parametrize("seed", MIXTURES)
def test_a_freer_request_of_a_mixture_is_never_worse(seed: int) -> None:
    rng, samples = random.Random(seed), 8
    cp, others = rng.choice([(2, 1), (2, 2)])
    given = fixed(rng, others, samples // cp)
    given |= {"cp": cp, "expert_parallel": True, "sequence_parallel": False}
    request = Request(cp * others, 0, total_batch_size=samples)
    check_chain(rng, "mixtral", "h100", request, given)


def check_chain(
    rng: random.Random, kind: str, machines: str, request: Request, given: dict[str, Any]
) -> None:
    """Drops what is given one after the other: no step gets longer by that."""
    cluster, seconds = CLUSTERS[machines](request.world_size), float("inf")
    names = [name for name in given if name != "expert_parallel"]
    table = PieceTable(record(kind), cluster)
    for dropped, asked in freer(replace(request, **given), rng.sample(names, len(names))):
        candidates = compare(asked, record(kind), cluster, table=table)
        best = choose(asked, record(kind), cluster, candidates=candidates)
        assert best.prediction is not None
        told = f"{kind}, {machines}, {request}: {given}, dropping {dropped}"
        assert best.prediction.step_s <= seconds * SAME, told
        seconds = best.prediction.step_s


# --- auto_parallel and merakc plan -----------------------------------------------------------


def source() -> Source:
    return load_source("tests.small_source:small")


GIVEN: tuple[dict[str, Any], ...] = (
    {"dp": 1},
    {"dp": 2},
    {"dp": 1, "tp": 2, "sequence_parallel": False},
    {"dp": 1, "pp": 2, "schedule": "1f1b"},
)
SAMPLES = 8


def planned() -> list[tuple[str, Plan]]:
    """The plans of all that is given, for this rank's part of the samples."""
    plans = []
    for given in GIVEN:
        batch = source().batch(SAMPLES // given["dp"])
        model = merakc.auto_parallel(source().model, batch, cluster=NOMINAL_CPU, **given)
        plans.append((model.plan.hash, model.plan))
    return plans


def test_auto_parallel_and_merakc_plan_choose_the_same() -> None:
    ranks = run_ranks(2, planned)
    for given, *found in zip(GIVEN, *ranks, strict=True):
        offline, _ = plan_offline(source(), Request(2, 0, **given), SAMPLES, NOMINAL_CPU)
        assert {hash_ for hash_, _ in found} == {offline.plan.hash}, given


# --- the seconds of a plan -------------------------------------------------------------------


@pytest.mark.parametrize("machines", [*CLUSTERS])
def test_a_plan_takes_the_same_seconds_wherever_they_are_asked_for(machines: str) -> None:
    cluster = CLUSTERS[machines](4)
    lowered, _ = plan_offline(source(), Request(4, 0, pp=2), 8, cluster)
    assert lowered.prediction is not None
    told = {
        "simulator": predict(lowered, cluster)[1].step_s,
        "one dp rank": predict(lowered, cluster, dp_rank=0)[0].step_s,
        "merakc simulate": simulated(lowered.plan, source(), cluster).prediction.step_s,  # type: ignore[union-attr]
        "report": make_report(lowered, cluster).verdict.step_s,
    }
    assert told == pytest.approx(dict.fromkeys(told, lowered.prediction.step_s), rel=1e-9)

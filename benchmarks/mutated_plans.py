"""`python -m benchmarks.mutated_plans`: damaged plan files are refused, or mean what they meant.

Plans of a small model are changed at random: bytes, values, keys, entries of lists; in half of
them the hash is computed again, so that it alone does not tell. Each is read and applied to the
model's graph. It must be refused with one `MerakError`, or mean the same; where the hash was made
anew it may also be another plan that is sound, and some of these are trained on local ranks and
compared with one process.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from torch import nn

from benchmarks.fuzz.mutations import PLAN_HEAD, damaged_bytes, places_in, rehashed
from benchmarks.harness import finish
from benchmarks.layouts import worst_difference
from benchmarks.models import words
from merakc.equality.check import DOUBLE, LIMIT
from merakc.equality.ranks import run_ranks
from merakc.equality.train import Case, comparable, train_in_one_process, train_on_rank
from merakc.errors import MerakError
from merakc.frontend.record import Recording
from merakc.ir.batches import BatchLayout
from merakc.ir.plan import Plan
from merakc.ir.plan_file import PlanFile, parse_plan
from merakc.ir.precision import Precision
from merakc.ir.program import Mesh
from merakc.ir.state import parse_shards
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import apply_plan, make_plan
from merakc.lowering.overlap import with_parts
from merakc.lowering.predict import predict
from merakc.lowering.recording import record_part
from merakc.machines.cluster import NOMINAL_GPU
from merakc.simulation.faults import verify_programs

SAMPLES, MICRO_BATCHES, VOCABULARY, LENGTH = 8, 4, 24, 6
REFUSED, SAME, OTHER = "refused", "the same plan", "another plan that is sound"
# What a plan reports and does not decide.
REPORTED = ("model", "whole_ops", "opaque_modules", "head", "batch_size")
MOST_RANKS = 8  # that are started to train


@cache
def model() -> nn.Module:
    """A Llama of two layers in float64, with shared embeddings and fewer key heads than heads."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().train()


def batch(samples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts and their own words as labels."""
    ids = words((samples, LENGTH), torch.Generator().manual_seed(seed), VOCABULARY)
    return {"input_ids": ids, "labels": ids}


@cache
def recorded(parts: int, precision: Precision | None) -> Recording:
    """The forward of one of so many micro-batches."""
    with comparable(lift=True):
        layout = BatchLayout((SAMPLES, SAMPLES), parts)  # of plans on one dp rank and on two
        return record_part(
            model(), (), batch(SAMPLES), layout, torch.device("cpu"), precision, divided=True
        )


@cache
def plans() -> tuple[PlanFile, ...]:
    """Plans that hold everything that plans can."""
    order = ("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
    zero = parse_shards([1, 2, 2], 2, 2)
    return (
        _plan(Mesh(tp=2, pp=2), "1f1b"),
        _plan(Mesh(dp=2, pp=2), "zb-v", state_shards=parse_shards("zero-1", 2, 4)),
        _plan(Mesh(tp=2, pp=2), "interleaved-1f1b", chunks=2, recompute="full", sequences=True),
        _plan(Mesh(dp=2, pp=2), "custom", order=order, state_shards=zero, precision=DOUBLE),
        _plan(Mesh(pp=2), "1f1b", recompute="solved", keep_bytes=(4096, -1)),
        _plan(Mesh(pp=2), "1f1b", recompute="budget", kept_blocks=("2 again", "1 products")),
        _plan(Mesh(tp=2, pp=2), "1f1b", sub_batches=(2, 1),
              machines=replace(NOMINAL_GPU, memory_bytes=0)),
    )  # fmt: skip


def _plan(
    mesh: Mesh,
    schedule: str,
    *,
    order: tuple[str, ...] = (),
    chunks: int = 1,
    recompute: str = "none",
    sequences: bool = False,
    precision: Precision | None = None,
    **decided: Any,
) -> PlanFile:
    lowered = make_plan(
        recorded(MICRO_BATCHES, precision),
        Strategy().on(
            mesh,
            micro_batches=MICRO_BATCHES,
            batch_size=SAMPLES,
            schedule=schedule,
            order=order,
            chunks=chunks,
            recompute=recompute,
            sequence_parallel=sequences,
        ),
        NOMINAL_GPU,
    )
    plan = lowered.plan
    plan = replace(plan, precision=precision, **decided)
    prediction, _ = predict(replace(lowered, plan=plan), NOMINAL_GPU, dp_rank=0)
    return PlanFile(plan, prediction)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A damaged file: of which plan, its text, and whether its hash was made anew."""

    base: int
    text: str
    hashed: bool


def mutants(count: int, seed: int) -> Iterator[Mutant]:
    """So many damaged files; every second one with a hash that fits, where there is one."""
    rng = random.Random(seed)
    texts = [p.text for p in plans()]
    for k in range(count):
        base = rng.randrange(len(texts))
        hashed = k % 2 == 1
        if not hashed and rng.random() < 0.5:
            damaged = damaged_bytes(texts[base], rng).decode(errors="replace")
            yield Mutant(base, damaged, False)
            continue
        body = json.loads(texts[base])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            mutate_body(body, rng)
        yield Mutant(base, rehashed(body) if hashed else json.dumps(body), hashed)


def mutate_body(body: dict[str, Any], rng: random.Random) -> None:
    """Changes one value, key or entry in place; each field of the plan is as likely as any."""
    decided = body["decisions"]
    tops = [(decided, k) for k in decided]
    tops += [(body, k) for k in body if k not in (*PLAN_HEAD, "decisions")]
    top, name = rng.choice(tops)
    places = [(top, name), *places_in(top[name])]
    owner, key = rng.choice(places)
    value = owner[key]
    match rng.randrange(8):
        case 0 if isinstance(owner, dict):
            del owner[key]
        case 1 if isinstance(owner, dict):
            owner[f"{key}{rng.choice('x_2')}"] = owner.pop(key)
        case 2 if isinstance(owner, dict):
            owner["unknown"] = value
        case 3 if isinstance(value, list) and value:
            del value[rng.randrange(len(value))]
        case 4 if isinstance(value, list) and value:
            value.insert(rng.randrange(len(value) + 1), copy.deepcopy(rng.choice(value)))
        case 5 if isinstance(value, list):
            rng.shuffle(value)
        case 6:
            other, place = rng.choice(places)
            owner[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(value)
        case _:
            owner[key] = _another(value, rng)


def _another(value: Any, rng: random.Random) -> Any:
    """A value of the same kind, near or far, or of another kind."""
    if rng.random() < 0.3:
        return rng.choice((None, True, "", "x", 0, -1, 1.5, [], {}, [0], float("nan"), 10**9))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, 2 * value, -value, 0, 1, 2, 3, 4, 8, 10**6))
    if isinstance(value, float):
        return rng.choice((-value, 2 * value, 0.0, float("inf"), value + 1e-9))
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        choices = (value[:at] + value[at + 1 :], value[:at] + rng.choice("0123*·x +(FBR") +
                   value[at + 1 :], value + value[at:], value.upper())  # fmt: skip
        return rng.choice(choices)
    return rng.choice((0, "", []))


def judge(mutant: Mutant) -> tuple[str, str | Plan]:
    """What becomes of a damaged file, and why it was refused, or the plan that it is.

    Whatever is raised that is no `MerakError` is a fault of merakc's.
    """
    try:
        plan = parse_plan(mutant.text, "plan.json").decisions
        lowered = apply_plan(plan, recorded(plan.micro_batches, plan.precision))
        lowered = with_parts(lowered, lambda parts: recorded(parts, plan.precision))
        ranks = [plan.mesh.rank(0, r, 0) for r in range(plan.pp)]
        programs = lowered.with_collectives(lowered.programs(ranks=ranks))
        verify_programs(programs, micro_batches=plan.micro_batches, training=True)
    except MerakError as error:
        return REFUSED, f"{type(error).__name__}: {error}"
    same = _meaning(plan) == _meaning(plans()[mutant.base].decisions)
    return (SAME if same else OTHER), plan


def _meaning(plan: Plan) -> str:
    """What a plan decides."""
    found = {k: v for k, v in dataclasses.asdict(plan).items() if k not in REPORTED}
    found["graph"] = found["graph"]["hash"]
    return json.dumps(found, sort_keys=True)


def error_of(plan: Plan, timeout_s: float = 120.0) -> float:
    """The largest relative error of two training steps by a plan, against one process."""
    batches = tuple(batch(SAMPLES * plan.dp, seed) for seed in (1, 2))
    case = Case(model(), plan, batches, lift=True)
    found = run_ranks(plan.mesh.world_size, train_on_rank, case, timeout_s=timeout_s)
    (reference,) = run_ranks(1, train_in_one_process, case)
    return worst_difference(found[0], [f.losses for f in found], reference, LIMIT).error


def main(
    count: Annotated[int, typer.Option(help="Damaged files.", min=1)] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the damage.")] = 0,
    train: Annotated[int, typer.Option(help="Other plans to train, each of its own kind.")] = 20,
) -> None:
    """Reads damaged plan files; exits with 1 where one is neither refused nor sound."""
    torch.set_num_threads(1)
    console = Console()
    start_s = time.perf_counter()
    outcomes: Counter[tuple[bool, str]] = Counter()
    faults: list[str] = []
    others: dict[str, Plan] = {}
    for mutant in track(mutants(count, seed), "reading", total=count, console=console):
        try:
            outcome, found = judge(mutant)
        except Exception as error:  # what is looked for
            faults.append(f"{type(error).__name__}: {error}")
            continue
        outcomes[mutant.hashed, outcome] += 1
        if outcome == OTHER:
            assert isinstance(found, Plan)
            if not mutant.hashed:
                faults.append(f"another plan under the hash of the first: {found.hash}")
            others.setdefault(_meaning(found), found)
    for (hashed, outcome), number in sorted(outcomes.items()):
        console.print(f"{'hash made anew' if hashed else 'hash as it was'}: {number:,} {outcome}")
    trained = [p for p in others.values() if p.mesh.world_size <= MOST_RANKS][:train]
    for plan in track(trained, "training", console=console):
        error = error_of(plan)
        if not error <= LIMIT:
            faults.append(f"a plan that trains wrong, by {error:.1e}: {plan}")
    console.print(f"{len(others)} other plans that are sound, {len(trained)} of them trained")
    for text in faults:
        console.print(text, style="red", markup=False)
    wall_s = time.perf_counter() - start_s
    finish(console, not faults, f"{count:,} files, {len(faults)} faults, {wall_s:.0f} s")


if __name__ == "__main__":
    typer.run(main)

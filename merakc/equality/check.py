"""Whether a plan trains as one process does: on local ranks, with a model of the same structure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import nn

from merakc.batches.split import call_arguments, split_batch
from merakc.equality.compare import KINDS, Difference, Reference, worst_differences
from merakc.equality.lower import lost, lower_strategy, replicas
from merakc.equality.ranks import RankError, RankTimeoutError, check_forks, in_child, run_ranks
from merakc.equality.references import yardstick
from merakc.equality.samples import drawn_batch, drawn_model
from merakc.equality.shrink import changes, parameter_count, shrink
from merakc.equality.train import Case, comparable, train_on_rank
from merakc.errors import ConfigError, MerakError, PlanError
from merakc.files.printable import count_of
from merakc.frontend.python.compared import Compared
from merakc.frontend.python.fingerprint import fingerprint, first_difference
from merakc.frontend.record import Recording
from merakc.ir.batches import BatchLayout
from merakc.ir.graph import OutputKind
from merakc.ir.layout import Layout
from merakc.ir.plan import Plan
from merakc.ir.precision import Precision
from merakc.ir.strategy import Strategy
from merakc.lowering.recording import record_part
from merakc.planner.carry import carry_plan
from merakc.planner.sources.source import Source
from merakc.report.units import format_bytes

STEPS = 2
LIMIT = 1e-10  # float64 has sixteen digits, and other orders of summation lose some
FLOAT32_LIMIT = 1e-5  # float32 has seven
# A model that cannot be made smaller is run as it is up to here: ranks and optimizers hold it many
# times over.
MOST_BYTES = 128 << 20
DOUBLE = Precision("float64", "float64", "float64")
SINGLE = Precision("float32", "float32", "float64")
SIZE = re.compile(r"\d+")
LABELS = {"loss": "loss", "gradient": "gradients", "weight": "weights", "buffer": "buffers"}


@dataclass(frozen=True, slots=True)
class Row:
    """The largest relative error of one kind, in one arithmetic, and what is allowed."""

    quantity: str
    arithmetic: str
    error: float
    name: str
    limit: float

    @property
    def passed(self) -> bool:
        """Whether it is within the limit."""
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What was compared, and how far it was apart.

    `checked` is the plan that was run. `lowered` holds the integers of the configuration that were
    lowered, `lost` what of the plan too few ranks leave out, `unlike` the tensors that are split
    over tp along other dims than in the plan, `failed` why the ranks did not come to an end,
    `replicas` the plan of dp ranks alone that was run where there were too few for all at once.
    """

    checked: Plan
    parameters: int
    checked_parameters: int
    lowered: dict[str, tuple[int, int]]
    lost: tuple[str, ...]
    unlike: tuple[str, ...]
    compared_with: str
    rows: tuple[Row, ...]
    failed: str
    seconds: float
    replicas: Plan | None = None

    @property
    def equal(self) -> bool:
        """Whether the ranks trained as one process does."""
        return not self.failed and bool(self.rows) and all(row.passed for row in self.rows)


Train = Callable[[Case], Reference]


def check_plan(
    plan: Plan,
    source: Source,
    *,
    ranks: int,
    seed: int = 0,
    timeout_s: float = 300.0,
    progress: Callable[[str], None] = lambda _: None,
    train: Train = train_on_rank,
) -> CheckResult:
    """Trains a model of the source's structure by the plan on local ranks, and compares.

    `train` is what each rank does. Raises `PlanError` for a plan of another model, `ConfigError`
    for a model that is too large and cannot be made smaller, or in a process whose forks cannot
    train, and what the plan's decisions raise where no smaller model allows them.
    """
    start_s = time.perf_counter()
    check_forks()
    progress(f"recording {source.name}")
    in_child(check_source, plan, source)
    strategy = lower_strategy(plan, ranks)
    dp_alone = replicas(plan, strategy, ranks)
    found, lowered = _small_source(plan, source, strategy, progress)
    rows: list[Row] = []
    checked: list[Plan] = []
    compared_with, failed = "", ""
    runs = [strategy] if dp_alone is None else [strategy, dp_alone]
    for (precision, limit, arithmetic), run in product(_comparisons(plan), runs):
        with drawn_model(found, seed) as model:
            case = _case(plan, found, model, replace(run, precision=precision), seed)
            checked.append(case.plan)
            what = f"{arithmetic}, dp={run.dp} alone" if run is dp_alone else arithmetic
            progress(f"training on {count_of(run.world_size, 'local rank')}, {what}")
            differences, compared_with, failed = _compare(case, train, limit, timeout_s, progress)
        rows += [
            Row(LABELS[kind], what, worst.error, worst.name, limit)
            for kind, worst in ((kind, differences.get(kind)) for kind in KINDS)
            if worst is not None
        ]
        if failed:
            break
    counts = parameter_count(source.model), parameter_count(found.model)
    return CheckResult(
        checked[0], *counts, lowered, lost(plan, *runs), unlike=unlike_splits(plan, checked[0]),
        compared_with=compared_with, rows=tuple(rows), failed=failed,
        seconds=time.perf_counter() - start_s,
        replicas=checked[1] if len(checked) > 1 and dp_alone is not None else None,
    )  # fmt: skip


def _compare(
    case: Case, train: Train, limit: float, timeout_s: float, progress: Callable[[str], None]
) -> tuple[dict[str, Difference], str, str]:
    """The largest differences of what each rank gave from one process, what in it they are from,
    and why nothing could be compared.
    """
    results, failed = _on_ranks(case.plan.mesh.world_size, train, case, timeout_s)
    if failed:
        return {}, "", failed
    reference = in_child(yardstick, case)
    progress(f"training in {reference.what}")
    plain, failed = _on_ranks(1, reference.train, case, timeout_s)
    if failed:
        return {}, reference.what, f"{reference.what}: {failed}"
    ours, wanted = results[0], plain[0]
    if not reference.buffers:
        ours, wanted = replace(ours, buffers={}), replace(wanted, buffers={})
    losses = [result.losses for result in results]
    return worst_differences(ours, losses, wanted, limit), reference.what, ""


def _on_ranks(
    ranks: int, train: Train, case: Case, timeout_s: float
) -> tuple[list[Reference], str]:
    """What each rank's training gave, or why they did not come to an end.

    Raises the `MerakError` of the first rank that raised one.
    """
    try:
        return run_ranks(ranks, train, case, timeout_s=timeout_s), ""
    except RankError as error:
        if isinstance(error.__cause__, MerakError):
            raise error.__cause__ from error
        return [], f"rank {error.rank} failed: {error.details.strip().splitlines()[-1]}"
    except RankTimeoutError as error:
        return [], f"{error}; give --timeout more seconds"


def unlike_splits(plan: Plan, checked: Plan) -> tuple[str, ...]:
    """The tensors of `checked` that are not split along the dims that the plan splits.

    Of a smaller model the sizes are others; which factors of which dims are split is compared, over
    each axis that is left.
    """
    over_tp = [plan.tp_splits, checked.tp_splits]
    of_experts = [plan.expert_splits, checked.expert_splits]
    found = set[str]()
    for pair in [over_tp] * (checked.tp > 1) + [of_experts] * checked.expert_parallel:
        kinds = [{name: _kind(layout) for name, layout in own.items()} for own in pair]
        names = {n for n in kinds[0] if n in checked.parameters} | kinds[1].keys()
        found.update(n for n in names if kinds[0].get(n) != kinds[1].get(n))
    return tuple(sorted(found))


def _kind(layout: Layout) -> str:
    """Which factors of which dims are split; which dim is said to be on one rank says nothing."""
    text = str(layout)
    return "@" if "@" in text else SIZE.sub("n", text)


def check_source(plan: Plan, source: Source) -> None:
    """Raises `PlanError`, with the first difference, where a plan is not for this model."""
    samples = max(plan.batch_size // max(plan.micro_batches, 1), 1)
    args, kwargs, layout = source.part(samples, alone=plan.dp == 1)
    if plan.dp * plan.micro_batches == 1:
        args, kwargs = split_batch(args, kwargs, layout.micro_batches, plan.batch_dims)[0]
        layout = BatchLayout((samples,), 1)
    cpu = torch.device("cpu")
    recording = record_part(
        source.model, args, kwargs, layout, cpu, plan.precision, dims=plan.batch_dims
    )
    difference = first_difference(plan.graph, fingerprint(recording.graph))
    if difference:
        raise PlanError(
            f"the plan was made for another graph ({plan.model}) than that of {source.name}: "
            f"{difference}; name the model that it was made for, with the same --seq"
        )


def _comparisons(plan: Plan) -> Iterator[tuple[Precision | None, float, str]]:
    """The arithmetics to compare in, with their limits.

    In mixed precision once in float32 with masters of float64, wider than what is computed as the
    plan's are, and once with all of the plan's casts lifted to float64. Beside products of float8
    in float64 alone: what another order of sums makes of float32 may be rounded to another number
    of eight bits, which is no small difference.
    """
    if plan.precision is None:
        yield None, LIMIT, "float64"
    elif plan.precision.products is not None:
        yield replace(DOUBLE, products=plan.precision.products), LIMIT, "float64, rounded"
    else:
        yield SINGLE, FLOAT32_LIMIT, "float32"
        yield DOUBLE, LIMIT, "float64"


def _small_source(
    plan: Plan, source: Source, strategy: Strategy, progress: Callable[[str], None]
) -> tuple[Source, dict[str, tuple[int, int]]]:
    """The smallest model of the structure that takes the plan's decisions, and what was lowered."""
    if source.config is None:
        size_bytes = 8 * parameter_count(source.model)
        if size_bytes > MOST_BYTES:
            raise ConfigError(
                f"{source.name}: its parameters take {format_bytes(size_bytes)} in float64, more "
                f"than the {format_bytes(MOST_BYTES)} up to which a model is run as it is, and a "
                "model of your own function cannot be made smaller; let the function return one "
                "of fewer or narrower layers, and plan for that"
            )
        return source, {}
    found = shrink(source, strategy.stage_count, progress)
    refusal: MerakError | None = None
    lifted = replace(strategy, precision=None)
    for small in reversed(found):
        if 8 * small.numbers > MOST_BYTES:
            break
        try:
            with drawn_model(small.source, 0) as model:
                record = _recorder(small.source, model, plan, lifted, lift=True)
                _carried(plan, lifted, record)
        except MerakError as error:
            refusal = refusal or error
            progress(f"trying a larger model: {error}")
        else:
            return small.source, changes(found[0], small)
    if refusal is not None:
        raise refusal
    raise ConfigError(
        f"{source.name}: no model of its structure was found that holds less than "
        f"{format_bytes(MOST_BYTES)} in float64 (the smallest has {found[-1].numbers:,} numbers); "
        "lower its configuration by hand, and plan and verify that"
    )


def _case(plan: Plan, source: Source, model: nn.Module, strategy: Strategy, seed: int) -> Case:
    """The training of a drawn model; from the second step on, texts that can be padded are."""
    lift = strategy.precision is None or strategy.precision.compute == DOUBLE.compute
    record = _recorder(source, model, plan, strategy, lift=lift)
    carried = _carried(plan, strategy, record)
    parts = strategy.micro_batches * strategy.dp
    batches = tuple(
        drawn_batch(source, parts * strategy.samples, seed + 1 + k, parts=parts, padded=k > 0)
        for k in range(STEPS)
    )
    return Case(model, carried, batches, lift)


def _carried(plan: Plan, strategy: Strategy, record: Callable[[int], Recording]) -> Plan:
    """A plan's decisions for what is recorded."""
    return in_child(lambda: carry_plan(plan, strategy, record).plan)


def _recorder(
    source: Source, model: nn.Module, plan: Plan, strategy: Strategy, *, lift: bool
) -> Callable[[int], Recording]:
    """Records a dp rank's batch, in any number of micro-batches, as its ranks will."""
    batch, sizes = drawn_batch(source, strategy.batch_size, 0), (strategy.batch_size,) * strategy.dp
    compared = Compared()

    @cache
    def recorded(parts: int) -> Recording:
        args, kwargs = call_arguments(batch)
        with comparable(lift=lift):
            found = record_part(
                model, args, kwargs, BatchLayout(sizes, parts), torch.device("cpu"),
                strategy.precision, couplings=plan.couplings, dims=plan.batch_dims,
                divided=strategy.lanes > 1, compared=compared,
            )  # fmt: skip
        if not any(o.kind is OutputKind.LOSS for o in found.graph.outputs):
            raise ConfigError(f"the forward of {found.model_name} returns no loss for its batch")
        return found

    return recorded

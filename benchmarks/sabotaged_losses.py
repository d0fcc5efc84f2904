"""Whether merakc sees that a rule of its algebra of batches is wrong, and by what.

Each sabotage (`benchmarks.loss_sabotages`) is put in place in turn, and every formula that it
reaches is run in this process, in four even and in two uneven parts. What the algebra says wrongly
then is seen by the comparison of shapes, by the certificate, by another check, by nothing, or it
changes nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from torch import Tensor

from benchmarks.loss_formulas.formula import EXTRA_DIMS, SAMPLES, Formula, Small, build, whole_batch
from benchmarks.sabotage import Log, Sabotage
from merakc.errors import MerakError, RecordError
from merakc.frontend.python.compared import Compared
from merakc.ir.batches import BatchLayout, BatchSplit, Rows
from merakc.ir.graph import Graph, InputKind, Output, OutputKind, Ref
from merakc.lowering.forwards import Forward
from merakc.lowering.recording import analysed
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.part import keyed
from merakc.passes.batches.proof.certificate import LIMIT, certify
from merakc.passes.batches.proof.replay import replay
from merakc.passes.batches.split import split
from merakc.passes.batches.states import Kind

CPU = torch.device("cpu")
EVEN, UNEVEN = (2, 2, 2, 2), (5, 3)


class Seen(StrEnum):
    """What sees a wrong rule; of several parts and layouts, the last counts."""

    NOT_REACHED = "not reached"
    HARMLESS = "changes nothing"
    SHAPES = "shapes"
    CHECK = "another check, or an error"
    CERTIFICATE = "certificate"
    MISSED = "missed"


@dataclass
class Subject:
    """A formula, recorded for several numbers of samples, and what its step is to give."""

    formula: Formula
    model: Small = field(init=False)
    batch: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.model, self.batch = build(self.formula), whole_batch(self.formula)
        dims = {"images": Rows(0, 1, 2)} if "images" in self.batch else {}
        dims |= {n: d if d is None else Rows(d) for n, d in EXTRA_DIMS.items()
                 if n in self.batch and n not in dims}  # fmt: skip
        layout = BatchLayout((SAMPLES,), len(EVEN))
        forward = Forward(
            self.model,
            (),
            self.batch,
            layout=layout,
            device=CPU,
            dtype=None,
            dims=dims,
            shared={},
            compared=Compared(),
        )
        self.graphs = {n: forward.sized(n).graph for n in {*EVEN, *UNEVEN, SAMPLES}}
        self.sampled = forward.sampled
        self.right = {sizes: self.step(sizes) for sizes in (EVEN, UNEVEN)}
        (part, *_) = self.found(EVEN).values()
        self.ops = {n.op.split(".")[1] for n in part.part.nodes}

    def step(self, sizes: tuple[int, ...]) -> tuple[str, list[Tensor]]:
        """The right step in words, and what it gives."""
        splits = _splits(self.found(sizes))
        return _text(splits), self.given(splits, sizes)

    def sized(self, samples: int) -> Graph:
        """The recording of so many samples."""
        return self.graphs[samples]

    def found(self, sizes: Sequence[int]) -> dict[int, Analysis]:
        """What is found of the parts, by their samples; the largest first."""
        least = min(sizes)
        return {
            n: analysed(self.sized, self.sampled, n, SAMPLES, least)
            for n in sorted(set(sizes), reverse=True)
        }

    def given(self, splits: Mapping[int, BatchSplit], sizes: Sequence[int]) -> list[Tensor]:
        """The loss and gradients of a step in parts."""
        state = dict(self.model.named_parameters())
        loss = replay([splits[n] for n in sizes], sizes, state, self.batch, self.sampled)
        grads = torch.autograd.grad(
            loss, list(state.values()), allow_unused=True, materialize_grads=True
        )
        return [loss.detach(), *grads]

    def whole(self, found: Analysis) -> list[Tensor]:
        """The loss and gradients of the whole batch at once, drawn as was found."""
        state = dict(self.model.named_parameters())
        scalars = {i.name: torch.zeros((), dtype=torch.int64) for i in found.whole.inputs
                   if i.kind is InputKind.SCALAR}  # fmt: skip
        known = {**state, **self.batch, **scalars}
        inputs = {i.name: known.get(i.target, known.get(i.name)) for i in found.whole.inputs
                  if i.name not in found.whole.constants}  # fmt: skip
        nodes = tuple(keyed(found, n, found.total) for n in found.whole.nodes)
        outputs = interpret(replace(found.whole, nodes=nodes), inputs)
        loss = outputs[found.whole.outputs.index(_loss(found))]
        grads = torch.autograd.grad(
            loss, list(state.values()), allow_unused=True, materialize_grads=True
        )
        return [loss.detach(), *grads]


def _splits(found: Mapping[int, Analysis]) -> dict[int, BatchSplit]:
    return {n: split(own, own.part.outputs) for n, own in found.items()}


def _text(splits: Mapping[int, BatchSplit]) -> str:
    """All of a step in words."""
    told: list[object] = []
    for made in splits.values():
        known, head = made.known, made.head
        told += [made.graph, head and (str(head.graph), head.waist)]
        told += [known.part, known.whole.graph, known.whole.waist, known.rows] if known else []
    return " ".join(map(str, told))


def judge(sabotage: Sabotage, subject: Subject) -> Seen:
    """What sees a sabotage in a formula."""
    if sabotage.ops and sabotage.ops.isdisjoint(subject.ops):
        return Seen.NOT_REACHED
    return max((_seen(sabotage, subject, sizes) for sizes in (EVEN, UNEVEN)), key=list(Seen).index)


def _seen(sabotage: Sabotage, subject: Subject, sizes: tuple[int, ...]) -> Seen:
    log, (text, right) = Log(), subject.right[sizes]
    with sabotage.put(log):
        try:
            found = subject.found(sizes)
            if not log.claims and (sabotage.claims or _text(_splits(found)) == text):
                return Seen.NOT_REACHED
            first, *others = found.values()
            certify(first, _loss(first), *others)
            given = subject.given(_splits(found), sizes)
            if subject.formula.draws:  # whatever is drawn, it is to be the same in one part
                right = subject.whole(first)
        except RecordError as error:
            return Seen.CERTIFICATE if "computed with numbers" in str(error) else Seen.CHECK
        except (AssertionError, LookupError, MerakError, RuntimeError, TypeError, ValueError):
            return Seen.CHECK
    if _apart(given, right) > LIMIT:
        return Seen.MISSED
    return Seen.SHAPES if _overturned(first, log) else Seen.HARMLESS


def _overturned(found: Analysis, log: Log) -> bool:
    """Whether a wrong claim was overturned: its value counts as coupled."""
    return any(
        state.kind is not Kind.COUPLED and found.states[Ref(name, k)].kind is Kind.COUPLED
        for name, claim in log.claims.items()
        for k, state in enumerate(claim.states)
        if state is not None
    )


def _loss(found: Analysis) -> Output:
    return next(o for o in found.part.outputs if o.kind is OutputKind.LOSS)


def _apart(given: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest difference, of the largest number or 1."""
    largest = max(1.0, *(float(x.abs().max()) for x in right))
    found = (
        float((a - b).abs().nan_to_num(math.inf).max()) for a, b in zip(given, right, strict=True)
    )
    return max(found) / largest


def subjects(formulas: Iterable[Formula]) -> Iterator[Subject]:
    """The formulas that can be in parts, recorded."""
    for formula in formulas:
        with contextlib.suppress(MerakError):
            yield Subject(formula)


@dataclass(frozen=True)
class Line:
    """A sabotage, and what sees it in each formula that it reaches."""

    sabotage: Sabotage
    seen: Mapping[str, Seen]

    @property
    def counts(self) -> Counter[Seen]:
        """How many formulas there are of each kind."""
        return Counter(self.seen.values())

    @property
    def verdict(self) -> Seen:
        """The weakest answer to a claim that is not harmless."""
        found = [s for s in Seen if self.counts[s]]
        return found[-1] if found else Seen.NOT_REACHED


def measure(sabotages: Sequence[Sabotage], among: Sequence[Subject]) -> Iterator[Line]:
    """A line for each sabotage."""
    for sabotage in sabotages:
        seen = {subject.formula.name: judge(sabotage, subject) for subject in among}
        yield Line(sabotage, {n: s for n, s in seen.items() if s is not Seen.NOT_REACHED})


def table(lines: Sequence[Line]) -> list[list[str]]:
    """The head of the table, and a row for each sabotage that reaches any formula."""
    kinds = [s for s in Seen if s is not Seen.NOT_REACHED]
    rows = [["kind of operation", "what a wrong rule says", *map(str, kinds)]]
    for line in lines:
        if line.seen:
            counts = [str(line.counts[s] or "") for s in kinds]
            rows.append([line.sabotage.of, line.sabotage.claim, *counts])
    return rows


def summary(lines: Sequence[Line]) -> str:
    """How many sabotages are seen, and by what."""
    reached = [line for line in lines if line.seen]
    wrong = [line for line in reached if any(s is not Seen.HARMLESS for s in line.seen.values())]
    total = sum((line.counts for line in reached), Counter[Seen]())
    seen = [line for line in wrong if line.counts[Seen.CERTIFICATE]]
    missed = [line for line in wrong if line.counts[Seen.MISSED]]
    cases = ", ".join(f"{total[s]} {s}" for s in Seen if s is not Seen.NOT_REACHED)
    return (
        f"{len(reached)} sabotages reach {sum(total.values())} formulas: {cases}. {len(wrong)} of "
        f"them make a step wrong or fail, {len(seen)} of which the certificate sees; "
        f"{len(missed)} are missed in some formula"
    )


def complaints(lines: Sequence[Line]) -> list[str]:
    """A line for each sabotage that nothing sees in some formula."""
    found = []
    for line in lines:
        missed = [name for name, seen in line.seen.items() if seen is Seen.MISSED]
        if missed:
            found.append(f"{line.sabotage.of}, {line.sabotage.claim}: {', '.join(missed)}")
    return found

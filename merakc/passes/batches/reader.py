"""Goes through two recordings of a forward, node by node, and says what each value is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from merakc.errors import RecordError
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Input, InputKind, Node, OutputKind, Ref, TensorSpec
from merakc.kernels.draws import KEY_POSITION
from merakc.kernels.opaque import OPAQUE, REACHED
from merakc.kernels.ops import resolve_op
from merakc.passes.batches.aligned import KNOWN
from merakc.passes.batches.apart import SEVERAL, holds_batch_norm, why_not_apart
from merakc.passes.batches.linear import of_sums
from merakc.passes.batches.local import by_row
from merakc.passes.batches.normalise import FULL
from merakc.passes.batches.own_rules import Place, own_rule
from merakc.passes.batches.places import INDEX, PUT, placed_rule
from merakc.passes.batches.routed import UNBIND, routed_rule
from merakc.passes.batches.states import (
    SAMPLES,
    Dim,
    Kind,
    Outcome,
    State,
    by_size,
    call_form,
    coupled,
    every,
    plain,
    size,
)
from merakc.passes.sharding.dims import given
from merakc.passes.sharding.rules import row_of

# Arguments of these types are numbers of arithmetic, and no sizes.
NUMBERS = frozenset(
    {"Tensor", "number", "Scalar", "float", "Optional[number]", "Optional[Scalar]",
     "Optional[float]"}
)  # fmt: skip
# Calls of which sizes that grow with the batch are looked at by the shapes of their results.
VIEWS = frozenset({"aten.reshape.default", "aten.expand.default", "aten.repeat.default"})
COPIES = frozenset({"aten.expand.default", "aten.repeat.default"})
# Calls that see memory, in which a part of a batch lies otherwise than the whole batch.
STRIDED = frozenset({"aten.as_strided_scatter.default"})
# Tensors of one number throughout: a part makes its own.
FILLS = frozenset(
    {FULL, "aten.zeros.default", "aten.ones.default", "aten.empty.memory_format",
     "aten.scalar_tensor.default"}
)  # fmt: skip


class Reader:
    """Goes through both graphs; `states` and `outcomes` are what it finds."""

    def __init__(
        self,
        part: Graph,
        whole: Graph,
        sampled: Mapping[str, Rows],
        samples: int,
        total: int,
        *,
        placing: bool = False,
    ) -> None:
        self.placing = placing
        self.part, self.whole, self.sampled = part, whole, sampled
        self.samples, self.total = samples, total
        self.states: dict[Ref, State] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.makers = {n.name: n for n in part.nodes}
        self.seen: dict[object, Outcome] = {}
        self.grads = part.grad_values()
        self.written = {o.name for o in part.outputs if o.kind is OutputKind.BUFFER}

    def enter(self, item: Input, twin: Input) -> None:
        """An input of the graphs."""
        batch = item.kind is InputKind.BATCH
        fixed = item.kind is InputKind.BUFFER and item.target not in self.written
        known = batch or fixed or item.kind is InputKind.CONSTANT
        state = State(Kind.CONSTANT, plain(item.spec.shape), known)
        if item.kind is InputKind.CONSTANT and not same_constant(self.part, self.whole, item.name):
            self.states[Ref(item.name)] = seen_by_shape(
                item.spec, twin.spec, self.samples, self.total, "a tensor of Python's numbers"
            )._replace(known=True, whole=True)
            return
        rows = self.sampled.get(item.target) if batch else None
        if rows is not None:
            dims: list[Dim] = list(plain(item.spec.shape))
            dims[rows.dim] = _without_ones((rows.outer, SAMPLES, rows.inner))
            state = State(Kind.ROWS, tuple(dims), known)
        self.states[Ref(item.name)] = self.checked(state, item.spec, twin.spec)

    def read(self, node: Node, twin: Node) -> None:
        """A node."""
        states = [self.states[r] for r in node.refs]
        known = all(s.known for s in states) and node.op not in KEY_POSITION
        outcome = self.known(node, twin) if known else self.outcome(node, twin, lifted=True)
        self.outcomes[node.name] = outcome
        # Where samples are taken apart, the whole batch has more of them.
        for k, (spec, other) in enumerate(zip(node.outputs, twin.outputs, strict=False)):
            if spec is not None and other is not None:
                state = outcome.states[k]
                assert state is not None, node
                state = self.checked(state, spec, other, copied=node.op in COPIES)
                if state.known is not known:
                    state = state._replace(known=known)
                self.states[node.outs[k]] = state

    # ------------------------------------------------------------------ of the batch alone

    def known(self, node: Node, twin: Node) -> Outcome:
        """A node that no parameter and no draw stands before.

        Where it couples, all samples together give its value, before the step; the shapes then say
        what a part sees of it.
        """
        if node.op == KNOWN:
            state = self.by_shape(node, node.spec, twin.spec)
            return Outcome((state._replace(known=True, whole=True),))
        if not node.refs:
            return self.made(node, twin)
        # What is made of a sum is made of the whole one: parts' quotients add up to less than one.
        if not any(self.states[r].whole or self.states[r].kind is Kind.SUM for r in node.refs):
            outcome = self.outcome(node, twin, lifted=False)
            if all(s.kind is not Kind.COUPLED for s in self.seen_states(node, twin, outcome)):
                return outcome
        outcome = self.outcome(node, twin, lifted=True)
        states: list[State | None] = []
        for mine, spec, other in zip(outcome.states, node.outputs, twin.outputs, strict=False):
            if mine is None or spec is None or other is None:
                states.append(None)
                continue
            seen = self.checked(mine, spec, other, copied=node.op in COPIES)
            if seen.kind not in (Kind.ROWS, Kind.CONSTANT) or seen.dims is None:
                seen = self.by_shape(node, spec, other)
            states.append(seen._replace(whole=True, routed=()))
        return Outcome(tuple(states))

    def seen_states(self, node: Node, twin: Node, outcome: Outcome) -> list[State]:
        """The states of a node's outputs, once the shapes are seen to agree."""
        # where samples are taken apart, the whole batch has more of them
        each = zip(outcome.states, node.outputs, twin.outputs, strict=False)
        return [
            self.checked(state, spec, other, copied=node.op in COPIES)
            for state, spec, other in each
            if state is not None and spec is not None and other is not None
        ]

    def made(self, node: Node, twin: Node) -> Outcome:
        """A tensor made of nothing: alike in all parts, or as long as the batch."""
        states: list[State | None] = []
        for spec, other in zip(node.outputs, twin.outputs, strict=True):
            if spec is None or other is None:
                states.append(None)
            elif spec == other and (node.args == twin.args or node.op in FILLS):
                states.append(State(Kind.CONSTANT, plain(spec.shape)))
            else:
                state = self.by_shape(node, spec, other)
                own = node.op in FILLS and state.kind is not Kind.COUPLED
                states.append(state._replace(whole=not own))
        return Outcome(tuple(states))

    def by_shape(self, node: Node, spec: TensorSpec, other: TensorSpec) -> State:
        """What a part sees of a value of the whole batch, as the shapes say."""
        return seen_by_shape(spec, other, self.samples, self.total, node.source)

    # ------------------------------------------------------------------ one node

    def outcome(self, node: Node, twin: Node, *, lifted: bool) -> Outcome:
        """The outcome of a node; `lifted` says that sums and whole values of the batch alone are
        given, as they are for what is computed in the step.
        """
        states = {r: _lifted(self.states[r]) if lifted else self.states[r] for r in node.refs}
        routed = node.op == UNBIND or any(s.routed for s in states.values())
        if routed or "sort" in node.op or node.op in (INDEX, PUT):  # by more than states
            return self._outcome(self._place(node, twin, states))
        key = (node.op, call_form(node, states, self.part), call_form(twin, {}, self.whole), lifted)
        if key not in self.seen:
            self.seen[key] = self._outcome(self._place(node, twin, states))
        return self.seen[key]

    def _place(self, node: Node, twin: Node, states: Mapping[Ref, State]) -> Place:
        return Place(
            self.part, self.whole, node, twin, states, before=self.states, makers=self.makers,
            samples=self.samples, total=self.total,
        )  # fmt: skip

    def _outcome(self, place: Place) -> Outcome:
        node, states = place.node, place.states
        if node.op in STRIDED and any(
            s.sampled or s.kind is not Kind.CONSTANT for s in states.values()
        ):
            raise RecordError(
                f"{node.source}: {node.op.split('.')[1]} of samples: it sees memory, where parts "
                "of a batch lie otherwise than the whole; use unfold, views or indices, or train "
                "with dp=1 and micro_batches=1"
            )
        for state in states.values():
            if state.kind is Kind.COUPLED:
                return Outcome(every(node, State(Kind.COUPLED, why=state.why)))
        routed = routed_rule(place)
        if routed is not None:
            return routed
        if self.other_sizes(place):
            return coupled(node, "a number of samples is among its arguments")
        if any(s.kind is Kind.SUM for s in states.values()):
            return of_sums(node, states)
        if node.op in KEY_POSITION and not any(s.sampled for s in states.values()):
            return self.drawn(place)
        if any(s.dims is None for s in states.values()):
            return coupled(node, "it is not known where the samples stand")
        if row_of(node.op) is None and not node.op.startswith("aten."):
            return self.by_itself(place)
        own = own_rule(place) or (placed_rule(place) if self.placing else None)
        if own is not None:
            return own
        found = by_row(self.part, node, states, self.samples)
        # Groups of samples that a part's size alone divides between.
        other = by_row(self.whole, place.twin, states, self.total)
        same = found._replace(states=other.states) == other == found
        return found if same else coupled(node, "other numbers of samples are divided otherwise")

    def drawn(self, place: Place) -> Outcome:
        """A draw of no samples: one for all, or as long as the batch and then a sample's own."""
        node, spec, other = place.node, place.node.spec, place.twin.spec
        grown = [k for k, (s, b) in enumerate(zip(spec.shape, other.shape, strict=True)) if s != b]
        if not grown:
            return Outcome(every(node, State(Kind.CONSTANT, plain(spec.shape))))
        (k, *more) = grown
        each, rest = divmod(spec.shape[k], self.samples)
        if more or rest or each * self.total != other.shape[k] or node.op not in MADE_DRAWS:
            return coupled(node, "a draw that grows otherwise than the samples")
        dims: list[Dim] = list(plain(spec.shape))
        outer = self._outer(node, k, each)
        dims[k] = _without_ones((outer, SAMPLES, each // outer))
        return Outcome(every(node, State(Kind.ROWS, tuple(dims))))

    def _outer(self, node: Node, k: int, each: int) -> int:
        """What stands outside of the samples in dim `k` of a draw, by what it meets."""
        at = KEY_POSITION[node.op] + 1
        sample, sizes = node.args[at], node.args[at + 1]
        if sample != 1:
            return 1
        before = 1
        for n in node.spec.shape[:k]:
            before *= n
        outer = sizes[0] // before
        return outer if outer and each % outer == 0 and sizes[0] % before == 0 else 1

    def by_itself(self, place: Place) -> Outcome:
        """A module or function that no rule can look into."""
        node = place.node
        if not any(s.sampled for s in place.states.values()):
            return self.of_constants(place)
        firsts = {
            s.dims[0] if s.dims and s.rows else () for s in place.states.values() if s.sampled
        }
        first = firsts.pop()
        if firsts or first[:1] != (SAMPLES,):
            return coupled(node, "it is not seen what it does to samples")
        states: list[State | None] = []
        for spec, other in zip(node.outputs, place.twin.outputs, strict=True):
            if spec is None or other is None:
                states.append(None)
                continue
            ends = size(first, self.samples), size(first, self.total)
            if spec == other:  # a buffer, written or not
                states.append(State(Kind.CONSTANT, plain(spec.shape)))
            elif (spec.shape[:1], other.shape[:1]) != ((ends[0],), (ends[1],)):
                return coupled(node, "it is not seen what it does to samples")
            else:
                states.append(State(Kind.ROWS, (first, *plain(spec.shape[1:]))))
        if not any(s is not None and s.sampled for s in states):
            return coupled(node, "it is not seen what it does to samples")
        if holds_batch_norm(node):
            written = State(Kind.COUPLED, why=f"{node.source}: batch norm in '{node.module}'")
            told = f"batch norm in '{node.module}' is over each micro-batch by itself"
            found = (written if s is not None and not s.sampled else s for s in states)
            return Outcome(tuple(found), assumed=told)
        what = node.module if node.op == OPAQUE else node.op
        if why := why_not_apart(place):
            return coupled(node, f"'{what}' {why}")
        told = f"'{what}' is seen to compute each sample by itself"
        return Outcome(tuple(states), assumed=told)

    def of_constants(self, place: Place) -> Outcome:
        """A module or function that no rule can look into, of what has no samples: each part calls
        it, and has a gradient of its own.
        """
        node = place.node
        states = tuple(
            None if o is None else State(Kind.CONSTANT, plain(o.shape)) for o in node.outputs
        )
        if self.grads.isdisjoint(node.refs):
            return Outcome(states)
        why, what = why_not_apart(place), node.module if node.op == OPAQUE else node.op
        if why == SEVERAL:
            return coupled(node, f"gradients of parts do not add up behind '{what}'")
        return coupled(node, f"'{what}' {why}") if why else Outcome(states)

    def other_sizes(self, place: Place) -> bool:
        """Whether a size or a place among a node's arguments grows with the batch, and is none of
        samples.
        """
        node, twin = place.node, place.twin
        if (node.args, node.kwargs) == (twin.args, twin.kwargs) or node.op in KEY_POSITION:
            return False
        if node.op in (OPAQUE, REACHED):  # the last is the name of the call
            return bool(node.args[:-1] != twin.args[:-1])
        if not node.op.startswith("aten."):
            return True
        pairs = zip(*with_defaults(node, node.args, twin.args), strict=True)
        differ = [k for k, (x, y) in enumerate(pairs) if x != y]
        if node.kwargs == twin.kwargs and number_places(node).issuperset(differ):
            return any(isinstance(value, bool) for k in differ for value in node.args[k : k + 1])
        if node.kwargs != twin.kwargs:
            return True
        if node.op == "aten.slice.Tensor" or node.op == "aten.split.Tensor":
            state = place.states[node.refs[0]]
            return state.dims is None or SAMPLES not in state.dims[given(node, "dim")]
        return node.op not in VIEWS

    def checked(
        self, state: State, spec: TensorSpec, other: TensorSpec, *, copied: bool = False
    ) -> State:
        """The state, once its samples are seen to be what grows with the batch."""
        if state.kind is Kind.COUPLED or state.routed or (state.whole and state.dims is None):
            return state
        if state.dims is not None and len(state.dims) == len(other.shape):
            now = zip(state.dims, spec.shape, other.shape, strict=True)
            if all(size(d, self.samples) == s and size(d, self.total) == b for d, s, b in now):
                return state
        dims = by_size(spec, other, self.samples, self.total)
        grown = sum(SAMPLES in d for d in dims or ())
        if state.kind is Kind.CONSTANT and copied and grown == 1:
            return state._replace(kind=Kind.ROWS, dims=dims)
        return State(
            Kind.COUPLED, known=state.known,
            why=state.why or "a dim grows otherwise than the samples do",
        )  # fmt: skip


MADE_DRAWS = frozenset({"merakc.uniform.default", "merakc.normal.default"})


def seen_by_shape(
    spec: TensorSpec, other: TensorSpec, samples: int, total: int, source: str
) -> State:
    """What the shapes of a value, of a part and of the whole batch, say of it."""
    dims = by_size(spec, other, samples, total)
    grown = sum(SAMPLES in d for d in dims or ())
    if dims is None or grown > 1:
        return State(Kind.COUPLED, why=f"{source}: a table of samples by samples")
    return State(Kind.ROWS if grown else Kind.CONSTANT, dims)


def number_places(node: Node) -> set[int]:
    """The arguments of a node that are numbers of arithmetic, and no sizes."""
    if node.op in KEY_POSITION:
        return {k for k, arg in enumerate(node.args) if isinstance(arg, float)}
    if not node.op.startswith("aten."):
        return set()
    arguments = resolve_op(node.op)._schema.arguments  # type: ignore[attr-defined]
    return {k for k, a in enumerate(arguments) if str(a.type) in NUMBERS}


def with_defaults(
    node: Node, mine: tuple[Any, ...], other: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments for two numbers of samples; one that is given in one alone has its default in the
    other.
    """
    if len(mine) == len(other):
        return mine, other
    arguments = resolve_op(node.op)._schema.arguments  # type: ignore[attr-defined]
    defaults = tuple(a.default_value for a in arguments[: max(len(mine), len(other))])
    return mine + defaults[len(mine) :], other + defaults[len(other) :]


def _lifted(state: State) -> State:
    """What the step sees of a value of the batch alone: its sum is there before."""
    if state.known and state.kind is Kind.SUM:
        return state._replace(kind=Kind.CONSTANT)
    return state


def same_constant(part: Graph, whole: Graph, name: str) -> bool:
    """Whether a tensor that was made in Python is the same for another number of samples."""
    mine, other = part.constants[name], whole.constants[name]
    return mine.shape == other.shape and torch.equal(mine, other)


def _without_ones(dim: tuple[int | str, ...]) -> Dim:
    return tuple(f for f in dim if f != 1)

"""Guards against numbers that are not finite: `if torch.isnan(loss): ...`.

They are recorded as for finite numbers, whatever stands in their branch, where a loss that is
finite proves that what they ask about was: then whoever runs the step can check that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf

from merakc.frontend.opaque import UntraceableError
from merakc.ir.graph import Node, Output, OutputKind, Ref

# What they say of finite numbers; and comparisons of a value with itself, and with infinity.
TESTS = {"aten.isnan.default": False, "aten.isinf.default": False, "aten.isfinite.default": True}
ITSELF = {"aten.ne.Tensor": False, "aten.eq.Tensor": True}
INFINITE = {"aten.ne.Scalar": True, "aten.eq.Scalar": False}
KEPT = frozenset({"aten.any.default", "aten.all.default", "aten.reshape.default",
                  "aten.detach.default", "aten.squeeze.default"})  # fmt: skip
NOT = ("aten.logical_not.default", "aten.bitwise_not.default")
EITHER = ("aten.logical_or.default", "aten.bitwise_or.Tensor")
BOTH = ("aten.logical_and.default", "aten.bitwise_and.Tensor", "aten.mul.Tensor")
LOGIC = frozenset({*KEPT, *NOT, *EITHER, *BOTH})
# Calls whose result is not finite where the values here are not; of a quotient, the first.
PASSING = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "sub.Tensor", "neg.default", "sum.default", "mean.default", "reshape.default",
        "clone.default", "detach.default", "to.dtype", "stack.default", "unsqueeze.default",
        "squeeze.default", "alias.default", "abs.default",
    )
)  # fmt: skip
# Calls whose result is finite where what they are of is.
SAME = ("aten.detach.default", "aten.abs.default", "aten.reshape.default")
SCALED = ("aten.mul.Tensor", "aten.div.Tensor")


@dataclass(frozen=True, slots=True)
class Assumed:
    """A value that was taken for finite, and the error that says where it was asked about."""

    ref: Ref
    error: UntraceableError
    source: str


@dataclass(eq=False)
class FiniteGuards:
    """The guards of one recording."""

    nodes: Sequence[Node]
    assumed: list[Assumed] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # lines of checks that rely on a finite loss

    def answer(self, ref: Ref, error: UntraceableError, source: str) -> bool | None:
        """What a question of whether numbers are finite says of those that are; None of others."""
        asked: list[Ref] = []
        found = self._truth(ref, {n.name: n for n in self.nodes}, asked)
        if found is not None:
            self.assume(asked, error, source)
        return found

    def proves(self, ref: Ref, outputs: Sequence[Output], wanted: bool, source: str) -> bool:
        """Whether a finite loss proves that a check holds, which then relies on that."""
        made = {n.name: n for n in self.nodes}
        asked: list[Ref] = []
        if self._truth(ref, made, asked) is not wanted or not asked:
            return False
        if not all(_proven(r, outputs, made) for r in asked):
            return False
        self.sources.append(source)
        return True

    def assume(self, refs: Sequence[Ref], error: UntraceableError, source: str) -> None:
        """Takes values for finite."""
        self.assumed += [Assumed(ref, error, source) for ref in refs]

    def _truth(self, ref: Ref, made: Mapping[str, Node], asked: list[Ref]) -> bool | None:
        """What a value is where those that are `asked` about are finite."""
        node = made.get(ref.node)
        if node is None:
            return None
        known = TESTS.get(node.op)
        if known is None and len(set(node.refs)) == 1:
            bound = node.args[1] if len(node.args) > 1 else None
            infinite = isinstance(bound, float) and isinf(bound)
            known = INFINITE.get(node.op) if infinite else None
            known = ITSELF.get(node.op) if len(node.refs) == 2 else known
        if known is not None:
            asked.append(node.refs[0])
            return known
        if node.op not in LOGIC or not node.refs:
            return None
        inner: list[bool] = []
        for each in node.refs:
            truth = self._truth(each, made, asked)
            if truth is None:  # which is seen at once of what is computed in many ways
                return None
            inner.append(truth)
        if node.op in NOT:
            return not inner[0]
        return any(inner) if node.op in EITHER else all(inner)

    def lines(self, outputs: Sequence[Output]) -> tuple[str, ...]:
        """The lines that rely on a finite loss. Raises the error of a guard that such a loss does
        not prove.
        """
        made = {n.name: n for n in self.nodes}
        for item in self.assumed:
            if not _proven(item.ref, outputs, made):
                raise item.error
        return tuple(dict.fromkeys([*(item.source for item in self.assumed), *self.sources]))


def _proven(ref: Ref, outputs: Sequence[Output], made: Mapping[str, Node]) -> bool:
    """Whether a value is finite if the loss is."""
    proven = _behind([o.ref for o in outputs if o.kind is OutputKind.LOSS], made)
    while ref not in proven and ref.node in made and made[ref.node].op in SAME:
        ref = made[ref.node].refs[0]
    return ref in proven


def _behind(losses: Sequence[Ref], made: Mapping[str, Node]) -> set[Ref]:
    """The values that a finite loss proves to be finite."""
    found: set[Ref] = set()
    waiting = list(losses)
    while waiting:
        ref = waiting.pop()
        node = made.get(ref.node)
        if ref in found or node is None:
            continue
        found.add(ref)
        if node.op in PASSING:
            waiting += node.refs
        elif node.op in SCALED and isinstance(node.args[0], Ref):
            # Zero times what is not finite is no number; what divides may be infinite.
            waiting += node.refs if node.op == SCALED[0] else [node.args[0]]
    return found

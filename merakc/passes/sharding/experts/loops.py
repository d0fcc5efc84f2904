"""Loops over experts, written as rows that are sorted by expert and multiplied in groups.

For each expert a mask says which rows are its own; they are computed on, by calls that are the same
for every expert but for its parameters, and added to a result, or written there. Where no two masks
choose the same, that is a mixture as `merakc.passes.sharding.experts.blocks` finds them: the number
of a row's expert is the one mask that is true of it, and parameters stand in a stack. Rows that no
expert has come last, behind all groups, and give nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from merakc.frontend.values.symbols import Number
from merakc.ir.graph import Graph, Input, InputKind, Node, Ref, map_refs
from merakc.kernels.opaque import OPAQUE, find
from merakc.passes.sharding.experts.by_row import by_row
from merakc.passes.sharding.experts.choices import Choices
from merakc.passes.sharding.experts.ends import GROUPED
from merakc.passes.sharding.experts.loop_writer import LoopWriter, OwnParametersError
from merakc.passes.sharding.experts.turns import INDEX, NotATurnError, Turn


@dataclass(frozen=True, slots=True)
class Found:
    """A graph with the loops that were shown to be mixtures sorted, and what stands in the way of
    others: lines and reasons.
    """

    graph: Graph
    faults: tuple[str, ...] = ()


def with_sorted_loops(graph: Graph) -> Graph:
    """The graph with its loops over experts as sorted rows."""
    return graph.told(sorted_loops).graph


def sorted_loops(graph: Graph) -> Found:
    """The same, and why some are not."""
    turns, faults = _turns(graph)
    for chain in _chains(graph, turns):
        try:
            graph = _Loop(graph, chain).written()
        except NotATurnError as error:
            faults.append(str(error))
    return Found(graph, tuple(dict.fromkeys(faults)))


def _turns(graph: Graph) -> tuple[list[Turn], list[str]]:
    turns: list[Turn] = []
    faults: list[str] = []
    parameters = {i.name for i in graph.inputs if i.kind is InputKind.PARAMETER}
    for node in graph.nodes:
        if node.op == OPAQUE and any(r.node in parameters for r in node.args[0]):
            try:
                turns.append(Turn(node, graph.specs()))
            except NotATurnError as error:
                faults.append(str(error))
    return turns, faults


def _chains(graph: Graph, turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Turns of which each writes to what the one before has written, which nothing else reads."""
    users, left = graph.users(), {o.ref.node for o in graph.outputs}
    after = {turn.target: turn for turn in turns}
    own = {Ref(turn.node.name) for turn in turns}
    for turn in turns:
        if turn.target in own:
            continue
        chain = [turn]
        while (following := after.get(Ref(chain[-1].node.name))) is not None:
            name = chain[-1].node.name
            if len(users[name]) > 1 or name in left:
                break
            chain.append(following)
        yield chain


class _Loop:
    """The turns of one loop."""

    def __init__(self, graph: Graph, turns: Sequence[Turn]) -> None:
        self.graph, self.turns, self.first = graph, turns, turns[0]
        self.choices = Choices(graph)
        self.inputs = {i.name: i for i in graph.inputs}

    def written(self) -> Graph:
        """The graph with the loop sorted. Raises `NotATurnError` where it is no mixture."""
        if len(self.turns) < 2:
            raise self._fault("only one expert is there; others are not alike")
        own, varied = self._own()
        self._look_behind_any()
        masks = [t.mask for t in self.turns if t.mask is not None]
        chosen = self.choices.of(masks)
        if chosen is None:
            raise self._fault("two experts may have the same row at once, by what their masks say")
        if self.first.once and not self.choices.distinct(masks, self.first.dim):
            raise self._fault(
                "a row that one expert has twice would be written once: use out.index_add_"
            )
        covers = self.choices.covers(chosen)
        writer = LoopWriter(self.graph, self.turns, own, self._marks(own), varied, covers=covers)
        try:
            made = writer.run()
        except OwnParametersError as error:
            raise NotATurnError(*error.args) from error
        self._check_rows(writer)
        names = {t.node.name for t in self.turns}
        nodes: list[Node] = []
        for node in self.graph.nodes:
            if node.name == self.turns[-1].node.name:
                nodes += writer.nodes
            if node.name not in names:
                nodes.append(node)
        functions = dict(self.graph.functions)
        functions |= writer.functions
        done = replace(self.graph, nodes=tuple(nodes), functions=functions)
        return done.renamed({Ref(self.turns[-1].node.name): made})

    def _fault(self, why: str) -> NotATurnError:
        return NotATurnError(find(self.first.node.args[-1]).source, why)

    def _look_behind_any(self) -> None:
        """Takes masks that say whether any choice of a row is an expert's for those that say which,
        where that is one at most.
        """
        masks = [t.mask for t in self.turns if t.mask is not None]
        behind = self.choices.before_any(masks)
        if behind is None or not self.choices.distinct(behind[0], behind[1][0]):
            return
        if not self.first.adds:
            raise self._fault("a row of two experts is what the last one writes")
        for turn, mask in zip(self.turns, behind[0], strict=True):
            turn.over(mask, behind[1])

    def _own(self) -> tuple[dict[Ref, tuple[Ref, ...]], dict[Ref, tuple[Ref, ...]]]:
        """The parameters of all experts, by those of the first; and other values of which rows are
        read, in the same way.

        Raises `NotATurnError` where turns differ in more than these, their mask, and what they
        write to.
        """
        columns: dict[Ref, tuple[Ref, ...]] = {}
        for calls in zip(*(_form(t) for t in self.turns), strict=False):
            if len({text for text, _, _ in calls}) > 1:
                raise NotATurnError(calls[1][2], "this call is not the same for every expert")
            for refs in zip(*(own for _, own, _ in calls), strict=True):
                if columns.setdefault(refs[0], refs) != refs:
                    raise NotATurnError(calls[0][2], "experts share some of their parameters")
        if len({len(t.calls) for t in self.turns}) > 1:
            raise self._fault("experts do not make the same calls")
        same, own = self.choices.same, dict[Ref, tuple[Ref, ...]]()
        varied = dict[Ref, tuple[Ref, ...]]()
        users = self.graph.users()
        for first, refs in columns.items():
            if len({same(r) for r in refs}) == 1:
                continue
            if self._is_read_alone(refs):
                varied[first] = refs
                continue
            items = [self.inputs.get(r.node) for r in refs]
            others = [n for r, t in zip(refs, self.turns, strict=True) for n in users[r.node]
                      if n is not t.node]  # fmt: skip
            are_own = len({*refs}) == len(refs) and _are_parameters(items)
            if are_own and others:
                raise NotATurnError(others[0].source, "parameters of an expert are read here, too")
            if not are_own or any(o.ref in refs for o in self.graph.outputs):
                raise self._fault(
                    f"'{first.node}' and what the other experts read there are no parameters of "
                    "their own, of one shape"
                )
            own[first] = refs
        return own, varied

    def _is_read_alone(self, refs: Sequence[Ref]) -> bool:
        """Whether of values, one of each expert's and none of a turn's, rows are read alone."""
        made = {Ref(t.node.name) for t in self.turns}
        if not made.isdisjoint(refs) or any(r.node in self.inputs for r in refs):
            return False
        return all(
            Ref(call.name) in turn.reads
            for ref, turn in zip(refs, self.turns, strict=True)
            for call in turn.calls
            if ref in call.refs
        )

    def _marks(self, own: Mapping[Ref, tuple[Ref, ...]]) -> dict[str, int]:
        """The number of the expert of each parameter that has a gradient where it has rows alone.

        Raises `NotATurnError` where only some experts are passed over that have none.
        """
        if not any(turn.hit for turn in self.turns):
            return {}
        if not all(turn.hit for turn in self.turns):
            raise self._fault("only some experts are passed over where they have no rows")
        items = [(k, self.inputs[r.node]) for refs in own.values() for k, r in enumerate(refs)]
        return {item.target: k for k, item in items if item.requires_grad}

    def _check_rows(self, writer: LoopWriter) -> None:
        """Raises `NotATurnError` where a call may compute a row of others."""
        rows = {Ref(n.name) for n in writer.nodes if n.op == INDEX}
        for node in writer.body:
            if node.op != GROUPED and not by_row(node, rows, writer.specs):
                raise NotATurnError(
                    node.source, f"{node.op} is not known to compute each row by itself"
                )
            rows.update(node.made)


def _are_parameters(items: Sequence[Input | None]) -> bool:
    own = [i for i in items if i is not None and i.kind is InputKind.PARAMETER]
    return len(own) == len(items) and len({(i.spec, i.requires_grad) for i in own}) == 1


def _form(turn: Turn) -> list[tuple[str, tuple[Ref, ...], str]]:
    """What each call of a turn computes, whatever the names; the values of the graph that it reads;
    its line.
    """
    numbers = {Ref(n.name, j): f"{k}.{j}" for k, n in enumerate(turn.calls)
               for j in range(len(n.outputs))}  # fmt: skip
    found = []
    for node in turn.calls:
        outside: list[Ref] = []

        def own(ref: Ref, outside: list[Ref] = outside) -> str:
            if ref in numbers:
                return numbers[ref]
            if ref in turn.places or ref == turn.given:
                return f"places {turn.places.get(ref)}"
            outside.append(ref)
            return "given"

        args = _plain(map_refs((node.args, node.kwargs), own))
        shapes = _plain(tuple((o.shape[1:], o.dtype) for o in node.outputs if o is not None))
        found.append((f"{node.op} {args} {shapes} {node.grad}", tuple(outside), node.source))
    assert turn.made is not None
    assert turn.target is not None
    end = f"{numbers[turn.made]} {turn.adds} {turn.dim}"
    found.append((end, (), turn.node.source))
    return found


def _plain(value: Any) -> Any:
    """Arguments with one name for how many rows there are."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return "rows" if isinstance(value, Number) else value

"""The step of a batch in parts: the graph of a part, what is known before, and the head.

A part's graph gives its share of the loss, or ends at the waist. Means over samples are scaled by
the part's share of them, constants that a sum is added to as well; numbers are those of the whole
batch; values that only the whole batch gives are inputs (`known.*`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from merakc.batches.split import taken_dims
from merakc.costs.work.flops import node_flops
from merakc.errors import RecordError
from merakc.ir.batches import (
    PER_MICRO_BATCH,
    WHOLE_BATCH,
    BatchSplit,
    Couplings,
    Head,
    Known,
    Rows,
    Share,
    ShareKind,
)
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.passes.batches.aligned import KNOWN
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.own_rules import BATCH_NORM
from merakc.passes.batches.part import PartWriter, keyed, known_name, share_name
from merakc.passes.batches.states import Kind, State
from merakc.passes.batches.waist import Waist, find_waist, is_work, of_parameters

# Of the arithmetic of a model's layers, what may run once for the whole batch on one stage: with
# more, the step would not be in parts.
HEAD_SHARE = 0.5
KINDS = {Kind.ROWS: ShareKind.ROWS, Kind.SUM: ShareKind.SUM, Kind.CONSTANT: ShareKind.CONSTANT}


def split(
    found: Analysis,
    outputs: Sequence[Output],
    couplings: Couplings = WHOLE_BATCH,
    *,
    most: float = HEAD_SHARE,
) -> BatchSplit:
    """The step of the forward for these of its outputs, in parts.

    With couplings "per micro-batch", each part counts as a batch of its own where samples are
    coupled. Raises `RecordError` where more than `most` of the layers' arithmetic stands behind
    what couples, or a buffer is written from values that are coupled.
    """
    return _Split(found, outputs, couplings, most).made()


def share_of(found: Analysis, ref: Ref) -> Share:
    """What a value of the parts is to the whole batch."""
    state, spec = found.states[ref], found.whole.specs()[ref]
    return Share(share_name(ref), KINDS[state.kind], spec, state.rows)


def known_values(found: Analysis, outputs: Sequence[Output]) -> Known | None:
    """What computes values of the batch alone, before the step, by names of `known_name`."""
    made = _Split(found, (), WHOLE_BATCH, HEAD_SHARE)
    return made.known(dict.fromkeys(o.ref for o in outputs))


def known_alone(graph: Graph, outputs: Sequence[Output]) -> Known | None:
    """The same, of a batch that is one part."""
    refs = list(dict.fromkeys(o.ref for o in outputs))
    if not refs:
        return None
    specs = graph.specs()
    given = [Output(share_name(r), OutputKind.RESULT, r) for r in refs]
    part = replace(graph, outputs=tuple(given)).pruned().without_unread_inputs()
    shares = tuple(Share(share_name(r), ShareKind.CONSTANT, specs[r]) for r in refs)
    inputs = tuple(Input(s.name, InputKind.ACTIVATION, s.spec, s.name) for s in shares)
    results = [Output(known_name(r), OutputKind.RESULT, Ref(share_name(r))) for r in refs]
    return Known(
        part, Head(Graph(inputs, (), tuple(results)), shares), dict.fromkeys(map(known_name, refs))
    )


class _Split:
    def __init__(
        self, found: Analysis, outputs: Sequence[Output], couplings: Couplings, most: float
    ) -> None:
        self.most = most
        self.found, self.states = found, found.states
        self.loss = next((o for o in outputs if o.kind is OutputKind.LOSS), None)
        roots = [o for o in outputs if o.kind is not OutputKind.BUFFER and self.is_coupled(o.ref)]
        norms = [o for o in outputs if o.kind is OutputKind.BUFFER and self.of_norm(o)]
        self.alone = tuple(norms)
        self.lines: tuple[str, ...] = ()
        if couplings == PER_MICRO_BATCH:
            self.check_places()
            coupled = [o for o in outputs if self.is_coupled(o.ref) and o not in (*norms, *roots)]
            self.alone = (*norms, *roots, *coupled)
            whys = dict.fromkeys(self.states[o.ref].why for o in (*roots, *coupled))
            self.lines = tuple(f"each micro-batch by itself, at {why}" for why in whys)
            roots = []
        if roots and self.loss is not None and self.loss not in roots:
            roots.append(self.loss)
        self.roots = tuple(roots)
        self.outputs = [o for o in outputs if o not in roots]
        self.parts = PartWriter(found)
        self.needed: dict[Ref, None] = {}  # of the batch alone, whole

    def state(self, ref: Ref) -> State:
        """The state of a value; of samples taken apart, the whole batch has more, which are as the
        first.
        """
        return self.states.get(ref) or self.states[Ref(ref.node)]

    def is_coupled(self, ref: Ref) -> bool:
        """Whether only the head can give an output."""
        state = self.states[ref]
        lost = state.kind is Kind.ROWS and state.rows is None  # in an order of its own
        return state.kind is Kind.COUPLED or lost

    def made(self) -> BatchSplit:
        waist = find_waist(self.found, [o.ref for o in self.roots]) if self.roots else None
        head = self.head(waist) if waist is not None else None
        outputs = [self.leaving(o) for o in self.outputs]
        outputs += [
            Output(share_name(r), OutputKind.WAIST, r) for r in (waist.values if waist else ())
        ]
        graph = self.parts.written(outputs, self.alone)
        known = self.known({**self.needed, **self.parts.known})
        results = {o.name: self.result(o) for o in self.outputs if o.kind is OutputKind.RESULT}
        late = [o for o in self.outputs if o.kind is OutputKind.BUFFER and o not in self.alone]
        written = {o.name: self.result(o)[0] for o in late}
        conventions = (*self.lines, *self.found.assumed)
        return BatchSplit(graph, known, head, results, written, conventions)

    def result(self, out: Output) -> tuple[ShareKind, Rows | None]:
        """How the results of the parts make that of the whole batch."""
        state = self.states[out.ref]
        if out in self.alone:
            shown, spec = self.found.shown(out.ref), self.found.part.specs()[out.ref]
            if shown.rows:
                return ShareKind.ROWS, shown.rows
            return (ShareKind.SUM if spec.dtype.is_floating_point else ShareKind.CONSTANT), None
        if state.known and (state.whole or state.kind is Kind.SUM):
            return (ShareKind.ROWS, state.rows) if state.rows else (ShareKind.CONSTANT, None)
        return KINDS[state.kind], state.rows

    def leaving(self, out: Output) -> Output:
        """An output of a part, checked."""
        state = self.states[out.ref]
        if out.kind is OutputKind.LOSS and state.kind is Kind.ROWS:
            raise RecordError("the loss has one number for each sample; return their mean or sum")
        buffer = out.kind is OutputKind.BUFFER and out not in self.alone
        if buffer and (state.kind not in (Kind.CONSTANT, Kind.SUM) or state.sampled):
            source = self.found.makers[out.ref.node].source
            raise RecordError(
                f"{source}: buffer '{out.name}' is written from samples of the batch that are "
                "coupled, or that it holds, and each part has only its own; train with dp=1 and "
                'micro_batches=1, or ask for couplings="per micro-batch", by which each '
                "micro-batch writes it"
            )
        return out

    def of_norm(self, out: Output) -> bool:
        """Whether a buffer is a batch norm's, whose statistics are of each part by convention, as
        is the number of batches that it has seen, by which these may be averaged.
        """
        owner = out.name.rpartition(".")[0]
        waiting = [out.ref]
        while waiting:
            ref = waiting.pop()
            node = self.found.makers.get(ref.node)
            if self.states[ref].kind is Kind.COUPLED:
                if node is None or node.module != owner:
                    return False
                waiting += node.refs
        outcomes = self.found.outcomes
        return self.states[out.ref].kind is not Kind.SUM and any(
            n.op == BATCH_NORM and n.module == owner and outcomes[n.name].assumed
            for n in self.found.part.nodes
        )

    # ------------------------------------------------------------------ the head

    def head(self, waist: Waist) -> Head:
        """The graph that runs once, on the waist and what is known of the whole batch."""
        whole = self.found.whole
        specs = whole.specs()
        names = {r: Ref(share_name(r)) for r in waist.values}
        nodes = [n for n in whole.nodes if n.name in waist.head]
        grads = whole.grad_values()
        inputs = [
            Input(to.node, InputKind.ACTIVATION, specs[r], to.node, r in grads)
            for r, to in names.items()
        ]
        read = [r for n in nodes for r in n.refs] + [o.ref for o in self.roots]
        for ref in dict.fromkeys(read):
            if ref not in names and self.state(ref).known:
                self.needed[ref] = None
                names[ref] = Ref(known_name(ref))
                inputs.append(Input(known_name(ref), InputKind.KNOWN, specs[ref], known_name(ref)))
        drawing = [keyed(self.found, n, self.found.total) for n in nodes]
        scalars = [i for i in whole.inputs if i.kind is InputKind.SCALAR]
        graph = (
            Graph((*inputs, *scalars), tuple(drawing), self.roots, {}, whole.functions)
            .renamed(names)
            .without_unread_inputs()
        )
        self.check_share(graph)
        why = next((s.why for o in self.roots if (s := self.states[o.ref]).why), "")
        source, _, reason = why.partition(": ")
        return Head(graph, tuple(share_of(self.found, r) for r in waist.values), source, reason)

    def check_share(self, head: Graph) -> None:
        """Refuses a head that is most of the model."""
        made, specs = of_parameters(self.found), self.found.whole.specs()
        work = {n.name: node_flops(n, specs) for n in self.found.whole.nodes
                if is_work(self.found, n, made)}  # fmt: skip
        mine, every = sum(work.get(n.name, 0) for n in head.nodes), sum(work.values())
        if mine <= self.most * every:
            return
        why = next((s.why for o in self.roots if (s := self.states[o.ref]).why), "")
        batch = [i.target for i in self.found.part.inputs if i.kind is InputKind.BATCH]
        taken = taken_dims({name: self.found.sampled.get(name) for name in batch})
        alone = ', or ask for couplings="per micro-batch", which takes each micro-batch for a batch'
        raise RecordError(
            f"{why}: samples of the batch are coupled before {mine / every:.0%} of the layers' "
            "arithmetic, so that it cannot run in parts; train with dp=1 and micro_batches=1"
            f"{'' if self.by_places() else f'{alone} of its own there'}; {taken}"
        )

    def check_places(self) -> None:
        """Refuses micro-batches for themselves where the batch says places among all samples."""
        if node := self.by_places():
            batch = [i.target for i in self.found.part.inputs if i.kind is InputKind.BATCH]
            raise RecordError(
                f'{node.source}: couplings="per micro-batch" cannot be: a tensor of the batch that '
                "every micro-batch is given whole says places among the samples of all of them, as "
                "edges of a graph do; train with dp=1 and micro_batches=1; "
                f"{taken_dims({name: self.found.sampled.get(name) for name in batch})}"
            )

    def by_places(self) -> Node | None:
        """The first node that couples samples by whole numbers which the batch says for all."""
        part, sampled = self.found.part, self.found.sampled
        specs, said = part.specs(), {
            i.name for i in part.inputs if i.kind is InputKind.BATCH and i.target not in sampled
        }  # fmt: skip
        for node in part.nodes:
            states = [self.states[r] for r in node.refs]
            if all(s.known for s in states):
                said |= {node.name} if any(r.node in said for r in node.refs) else set()
            elif (
                any(s and s.kind is Kind.COUPLED for s in self.found.outcomes[node.name].states)
                and all(s.kind is not Kind.COUPLED for s in states)
                and any(_is_places(specs[r]) for r in node.refs if r.node in said)
            ):
                return node
        return None

    # ------------------------------------------------------------------ before the step

    def known(self, wanted: Mapping[Ref, None]) -> Known | None:
        """The graphs that compute these values of the batch alone, before the step."""
        if not wanted:
            return None
        whole, specs = self.found.whole, self.found.whole.specs()
        keep: set[str] = set()
        constants: dict[str, torch.Tensor] = {}  # as the whole batch makes them
        shares: dict[Ref, None] = {}
        waiting = list(wanted)
        while waiting:
            ref = waiting.pop()
            state = self.state(ref)
            if state.whole or state.routed:
                if ref.node in whole.constants:
                    constants[ref.node] = whole.constants[ref.node]
                elif ref.node not in keep:
                    keep.add(ref.node)
                    waiting += self.made_of(ref)
            else:
                shares[ref] = None
        names = {r: Ref(share_name(r)) for r in shares}
        inputs = [Input(n.node, InputKind.ACTIVATION, specs[r], n.node) for r, n in names.items()]
        inputs += [i for i in whole.inputs if i.name in constants]
        outputs = [Output(known_name(r), OutputKind.RESULT, names.get(r, r)) for r in wanted]
        nodes = tuple(n for n in whole.nodes if n.name in keep)
        graph = Graph(tuple(inputs), nodes, (), constants, whole.functions).renamed(names)
        graph = replace(graph, outputs=tuple(outputs))
        part = PartWriter(self.found, before=True)
        own = part.written([Output(share_name(r), OutputKind.RESULT, r) for r in shares])
        assert not part.known, part.known
        rows = {known_name(r): self.state(r).rows for r in wanted}
        waist = tuple(share_of(self.found, r) for r in shares)
        return Known(own, Head(graph, waist), rows)

    def made_of(self, ref: Ref) -> tuple[Ref, ...]:
        """What a value is made of in the recording of the whole batch."""
        maker = self.found.makers.get(ref.node)
        if maker is None or maker.op == KNOWN:
            return self.found.twins[ref.node].refs
        return maker.refs  # samples that were taken apart are more in the whole batch


def _is_places(spec: TensorSpec) -> bool:
    return not (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype == torch.bool)

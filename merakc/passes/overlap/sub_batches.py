"""A stage's graph for a micro-batch, made of its graph for a part of one, several times over.

The parts share parameters, and whatever does not depend on the batch is computed once. Tensors of
samples are cut along the dim of the samples on their way in and joined on their way out, so that
other stages see nothing of it. The losses of the parts add up to the micro-batch's, and so do the
gradients. What one part computes is independent of all others: their nodes may run in any order,
one part's arithmetic under another's communication.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from merakc.errors import PlanError
from merakc.ir.batches import Rows
from merakc.ir.graph import (
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Ref,
    TensorSpec,
    map_refs,
)
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.sharding.factors import leaves
from merakc.passes.sharding.key_draws import sample_factors
from merakc.passes.sharding.propagate import propagate
from merakc.passes.stages.stage import Stages, value_name

FIRST_SAMPLE = "first_sample"


@dataclass(frozen=True)
class Parts:
    """The stages of a recording of one of `count` equal parts of a micro-batch.

    `samples` are those of a part. `sample_dims` has the dim of the samples of each value that
    passes between stages and depends on the batch.
    """

    count: int
    samples: int
    stages: Stages
    sample_dims: Mapping[str, int]


def make_parts(
    whole: Graph,
    whole_stages: Stages,
    part: Graph,
    stages: Stages,
    rows: Mapping[str, Rows | None],
) -> Parts:
    """Compares the graph of a micro-batch with that of a part of one, both before sharding.

    `rows` says where the samples stand in what the step brings, by its target. Raises `PlanError`
    where the batch is not divided, or not along dim 0.
    """
    for item in part.inputs:
        stand = rows.get(item.target) if item.kind is InputKind.BATCH else None
        if stand not in (None, Rows()):
            raise PlanError(
                f"a micro-batch does not divide into parts: the samples of '{item.target}' are not "
                "its dim 0"
            )
    sizes = {i.name: i.spec.shape for i in part.inputs if i.kind is InputKind.BATCH}
    sampled = {
        i.name: (i.spec.shape[0], sizes[i.name][0])
        for i in whole.inputs
        if i.kind is InputKind.BATCH and i.spec.shape != sizes.get(i.name, i.spec.shape)
    }
    if len(set(sampled.values())) != 1:
        raise PlanError(f"a micro-batch does not divide into equal parts: {sampled}")
    samples, own = next(iter(sampled.values()))
    passed = {Ref(o.name): o.ref for g in whole_stages.graphs for o in g.outputs
              if o.kind is OutputKind.ACTIVATION}  # fmt: skip
    dims = _sample_dims(whole, sampled, list(passed.values()), samples) if passed else {}
    return Parts(samples // own, own, stages, {value_name(ref): d for ref, d in dims.items()})


def _sample_dims(
    graph: Graph, sampled: Collection[str], refs: Collection[Ref], samples: int
) -> dict[Ref, int]:
    """The dim of each value of which the outermost factors are the samples, where it has one."""
    dims = propagate(graph)
    of_samples = sample_factors(dims, sampled)
    found: dict[Ref, int] = {}
    for ref in refs:
        for k, dim in enumerate(dims.of[ref]):
            size = 1
            for factor in leaves(dim):
                if size == samples or factor not in of_samples:
                    break
                size *= factor.size
            if size == samples:
                found[ref] = k
    return found


def divided(whole: Graph, part: Graph, parts: Parts) -> Graph:
    """The graph of a micro-batch from that of a part, both local, of the same stage.

    Nodes of part j have "@j" behind their names. Raises `PlanError` where the parts cannot give
    what the whole gives: a buffer that the forward writes, a result, a value that another stage
    reads and that is not divided by samples, or a graph that depends on the number of samples.
    """
    return _Divider(whole, part, parts).run()


class _Divider:
    """Writes the graph. `now[j]` has the values of part j by those of the part's own graph."""

    def __init__(self, whole: Graph, part: Graph, parts: Parts) -> None:
        self.whole, self.part, self.parts = whole, part, parts
        self.count = parts.count
        self.inputs: list[Input] = []
        self.before: list[Node] = []
        self.own: list[list[Node]] = [[] for _ in range(self.count)]
        self.now: list[dict[Ref, Ref]] = [{} for _ in range(self.count)]
        self.dividing: set[str] = set()  # the names of what differs from part to part
        self.first_sample = ""

    def run(self) -> Graph:
        held = {i.name: i for i in self.whole.inputs}
        for item in self.part.inputs:
            self.enter(item, held.get(item.name))
        inputs = {i.name for i in self.inputs}
        missing = [i.name for i in self.whole.inputs
                   if i.name not in inputs and i.kind is not InputKind.CONSTANT]  # fmt: skip
        if missing:
            raise self.refused(f"does not read {', '.join(missing)}")
        for node in self.part.nodes:
            self.write(node)
        after: list[Node] = []
        outputs = [self.leave(out, after) for out in self.whole.outputs]
        nodes = (*self.before, *(n for own in self.own for n in own), *after)
        graph = Graph(
            tuple(self.inputs), nodes, tuple(outputs), self.part.constants, self.part.functions
        )
        specs, wanted = graph.specs(), self.whole.specs()
        for out, full in zip(graph.outputs, self.whole.outputs, strict=True):
            if specs[out.ref] != wanted[full.ref]:
                raise self.refused(f"makes {out.name} as {specs[out.ref]}, {wanted[full.ref]}")
        return graph

    def refused(self, why: str) -> PlanError:
        return PlanError(
            f"a micro-batch cannot be run in {self.count} parts: the graph of a part {why} where "
            "that of the whole differs; give overlap=1"
        )

    def enter(self, item: Input, full: Input | None) -> None:
        """Takes an input of the part from that of the whole."""
        if item.kind is InputKind.CONSTANT:
            self.inputs.append(item)
            return
        if full is None or (full.kind, full.target) != (item.kind, item.target):
            raise self.refused(f"reads {item.kind} {item.name}")
        self.inputs.append(full)
        if item.target == FIRST_SAMPLE and item.kind is InputKind.SCALAR:
            self.first_sample = item.name
            self.dividing.add(item.name)
            for j in range(1, self.count):
                name = f"{item.name}@{j}"
                args = (Ref(item.name), j * self.parts.samples)
                self.own[j].append(Node(name, "aten.add.Tensor", args, (), (item.spec,)))
                self.now[j][Ref(item.name)] = Ref(name)
        elif full.spec != item.spec or item.name in self.parts.sample_dims:
            # One of equal shape has its samples split over tp: a rank's are not those of its parts.
            self.cut(item, full)

    def cut(self, item: Input, full: Input) -> None:
        """Cuts an input along its samples."""
        dim = 0 if item.kind is InputKind.BATCH else self.parts.sample_dims.get(item.name)
        if dim is None or full.spec != self.joined(item.spec, dim):
            raise self.refused(f"reads {item.name} as {item.spec} of {full.spec}")
        name, sizes = f"{item.name}@", (item.spec.shape[dim],) * self.count
        specs = (item.spec,) * self.count
        op = "aten.split_with_sizes.default"
        self.before.append(Node(name, op, (Ref(item.name), sizes, dim), (), specs))
        self.dividing.add(item.name)
        for j, now in enumerate(self.now):
            now[Ref(item.name)] = Ref(name, j)

    def joined(self, spec: TensorSpec, dim: int) -> TensorSpec:
        shape = list(spec.shape)
        shape[dim] *= self.count
        return TensorSpec(tuple(shape), spec.dtype)

    def write(self, node: Node) -> None:
        """Writes a node once for each part, or once where its parts would be alike."""
        reads = {r.node for r in node.refs}
        at = KEY_POSITION.get(node.op)
        if at is not None and node.args[at + 1] < 0:  # all samples draw the same
            reads.discard(self.first_sample)
        if self.dividing.isdisjoint(reads):
            self.own[0].append(self.copy(node, 0, node.name))
            return
        self.dividing.add(node.name)
        for j, own in enumerate(self.own):
            name = f"{node.name}@{j}"
            own.append(self.copy(node, j, name))
            for k in range(len(node.outputs)):
                self.now[j][Ref(node.name, k)] = Ref(name, k)

    def copy(self, node: Node, j: int, name: str) -> Node:
        now = self.now[j]
        return replace(
            node,
            name=name,
            args=map_refs(node.args, lambda r: now.get(r, r)),
            kwargs=map_refs(node.kwargs, lambda r: now.get(r, r)),
        )

    def leave(self, out: Output, after: list[Node]) -> Output:
        """An output of the whole from those of the parts."""
        own = next((o for o in self.part.outputs if (o.name, o.kind) == (out.name, out.kind)), None)
        if own is None or out.kind not in (OutputKind.LOSS, OutputKind.ACTIVATION):
            raise self.refused(f"makes no {out.kind} {out.name}")
        specs = self.part.specs()
        refs = tuple(now.get(own.ref, own.ref) for now in self.now)
        if out.kind is OutputKind.LOSS:
            total = refs[0]
            for j, ref in enumerate(refs[1:], 1):
                name = f"{out.name}@{j}.sum"
                loss = (specs[own.ref],)
                after.append(Node(name, "aten.add.Tensor", (total, ref), (), loss))
                total = Ref(name)
            return out.at(total)
        if own.ref.node not in self.dividing:
            return out.at(own.ref)
        dim = self.parts.sample_dims.get(out.name)
        if dim is None:
            raise self.refused(f"makes {out.name}, of which no dim is that of the samples,")
        name, spec = f"{out.name}@", self.joined(specs[own.ref], dim)
        after.append(Node(name, "aten.cat.default", (refs, dim), (), (spec,)))
        return out.at(Ref(name))

"""Every piece of memory that a rank takes in a step, and from when to when it is needed.

The executor's way through a Program, with memory in the place of values. A moment is a call of a
graph or an action; memory is needed from the moment that makes it to the last that reads what lies
in it, views and values that are written over it included. Parameters, their gradients, the batch
and what the user is given lie elsewhere, and so does what the head takes while it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from merakc.analysis.accumulation import accumulated, added_at_once
from merakc.analysis.aliases import last_uses
from merakc.analysis.calls import receives_ahead
from merakc.analysis.liveness import owners, working_bytes
from merakc.ir.graph import Graph, InputKind, OutputKind, Ref
from merakc.ir.program import Action, ActionKind, Program, StageGraphs
from merakc.kernels.ops import OUT, WAIT

Work = tuple[int, int]  # stage, micro-batch


@dataclass(slots=True)
class Life:
    """Memory of so many bytes that is needed from the moment `start` to the moment `stop`, both of
    them included.
    """

    name: str
    size_bytes: int
    start: int
    stop: int

    def until(self, moment: int) -> None:
        """It is read then, too."""
        self.stop = max(self.stop, moment)


def most_alive(lives: Collection[Life]) -> int:
    """The most bytes that are needed at one moment: no arena for all of them is smaller."""
    changes = Counter[int]()
    for life in lives:
        changes[life.start] += life.size_bytes
        changes[life.stop + 1] -= life.size_bytes
    return max(accumulate(changes[moment] for moment in sorted(changes)), default=0)


def step_lives(program: Program, chunks: Mapping[int, StageGraphs]) -> tuple[Life, ...]:
    """The memory of a step of one rank, whose stages are `chunks`, in the order in which it is
    made.

    A message is taken to have left when it is sent: whoever writes there waits until it has.
    """
    return tuple(_Walk(program, chunks).run())


@dataclass(frozen=True, slots=True)
class _Piece:
    """A graph: in whose memory its values lie, what it makes there and when it is last read, by
    the numbers of its nodes; and what calls take while they run.
    """

    graph: Graph
    home: Mapping[Ref, Ref]
    made: Mapping[Ref, tuple[int, int]]  # bytes, and the node
    last: Mapping[Ref, int]
    working: Mapping[int, int]


def _piece(graph: Graph, chunk: StageGraphs) -> _Piece:
    home, specs = owners(graph), graph.specs()
    last = last_uses(graph, home)
    place = {node.name: k for k, node in enumerate(graph.nodes)}
    for k, node in enumerate(graph.nodes):
        if node.op == WAIT:  # what was started reads its arguments until here
            for ref in graph.nodes[place[node.refs[0].node]].refs:
                last[home[ref]] = max(last[home[ref]], k)
    leaves = {home[o.ref] for o in graph.outputs if _leaves(o.kind, o.name, chunk)}
    working = {k: working_bytes(node, specs) for k, node in enumerate(graph.nodes)}
    for name in accumulated(graph, chunk.parameters).values():
        working[place[name]] += added_at_once(graph.nodes[place[name]])
    made = {
        ref: (specs[ref].size_bytes, k)
        for k, node in enumerate(graph.nodes)
        for ref in node.made
        if home[ref] == ref and ref not in leaves and node.op != OUT
    }
    return _Piece(graph, home, made, last, {k: size for k, size in working.items() if size})


def _leaves(kind: OutputKind, name: str, chunk: StageGraphs) -> bool:
    """Whether an output is kept by whoever runs the step."""
    if kind is OutputKind.GRADIENT:
        return name not in exchanged(chunk)
    return kind is OutputKind.RESULT


def exchanged(chunk: StageGraphs) -> frozenset[str]:
    """The values that a stage exchanges, or their gradients."""
    received = (i.name for i in chunk.forward.inputs if i.kind is InputKind.ACTIVATION)
    sent = (o.name for o in chunk.forward.outputs if o.kind is OutputKind.ACTIVATION)
    return frozenset((*received, *sent))


@dataclass(slots=True)
class _Walk:
    """The walk along one Program."""

    program: Program
    chunks: Mapping[int, StageGraphs]
    now: int = 0
    found: list[Life] = field(default_factory=list)
    pieces: dict[int, _Piece] = field(default_factory=dict)  # by the identity of graphs
    orders: dict[Work, list[ActionKind]] = field(default_factory=dict)
    # What a micro-batch holds on a stage; None of what lies elsewhere.
    values: dict[Work, dict[str, Life | None]] = field(default_factory=dict)
    tangents: dict[Work, dict[str, list[Life | None]]] = field(default_factory=dict)
    outgoing: dict[tuple[int, int, str, bool], Life | None] = field(default_factory=dict)
    handed: dict[object, Life | None] = field(default_factory=dict)
    posted: dict[int, Life] = field(default_factory=dict)
    waist: list[Life] = field(default_factory=list)

    def run(self) -> list[Life]:
        actions = self.program.actions
        for action in actions:
            if action.kind.is_compute:
                work = action.stage, action.micro_batch
                self.orders.setdefault(work, []).append(action.kind)
        for k, (action, ahead) in enumerate(
            zip(actions, receives_ahead(self.program), strict=True)
        ):
            self.now += 1
            self._post(ahead)
            if action.kind is ActionKind.SEND:
                self._send(action)
            elif action.kind is ActionKind.RECV:
                self._receive(k, action)
            elif action.kind is ActionKind.HEAD:
                self._couple(action.stage)
            elif action.kind.is_compute:
                self._compute(action)
        return [life for life in self.found if life.size_bytes]

    def _new(self, name: str, size_bytes: int) -> Life:
        self.found.append(Life(name, size_bytes, self.now, self.now))
        return self.found[-1]

    def _post(self, ahead: Sequence[int]) -> None:
        for k in ahead:
            action = self.program.actions[k]
            if action.kind is ActionKind.RECV and action.peer != self.program.rank:
                self.posted[k] = self._new(str(action), action.size_bytes)

    def _send(self, action: Action) -> None:
        sent = self.outgoing.get((action.stage, action.micro_batch, action.value, action.is_grad))
        if sent is not None:
            sent.until(self.now)
        if action.peer == self.program.rank:
            self.handed[action.message] = sent

    def _receive(self, position: int, action: Action) -> None:
        remote = action.peer != self.program.rank
        found = self.posted.pop(position) if remote else self.handed.pop(action.message)
        if found is not None:
            found.until(self.now)
        work = action.stage, action.micro_batch
        if action.is_grad:
            self.tangents.setdefault(work, {}).setdefault(action.value, []).append(found)
        else:
            self.values.setdefault(work, {})[action.value] = found

    def _couple(self, stage: int) -> None:
        """The head reads what micro-batches have handed over, and gives each its gradients."""
        for life in self.waist:
            life.until(self.now)
        self.waist.clear()
        outputs = self.chunks[stage].forward.outputs
        waist = {o.name for o in outputs if o.kind is OutputKind.WAIST}
        for work, order in self.orders.items():
            for graph in self.chunks[stage].pieces(order) if work[0] == stage else ():
                for item in graph.inputs if graph else ():
                    if item.kind is InputKind.TANGENT and item.target in waist:
                        name = f"gradient of {item.target} {work[1]}"
                        life = self._new(name, item.spec.size_bytes)
                        self.values.setdefault(work, {})[item.key] = life

    def _compute(self, action: Action) -> None:
        work, chunk = (action.stage, action.micro_batch), self.chunks[action.stage]
        order = self.orders[work]
        graph = chunk.piece(action.kind, again=ActionKind.RECOMPUTE in order)
        held = self.values.setdefault(work, {})
        if graph is None:
            held.clear()
            return
        if id(graph) not in self.pieces:
            self.pieces[id(graph)] = _piece(graph, chunk)
        piece = self.pieces[id(graph)]
        if action.kind is ActionKind.FORWARD:
            self._keep_buffers(work, chunk)
        elif action.kind.sends_gradients:
            self._sum_tangents(work, chunk)
        given = self._given(action, piece, held)
        begin, made = self.now + 1, dict[Ref, Life]()
        for ref, (size_bytes, k) in piece.made.items():
            made[ref] = Life(f"{action} {ref.node}", size_bytes, begin + k, begin + piece.last[ref])
        for k, size_bytes in piece.working.items():
            name = f"{action} in {graph.nodes[k].name}"
            self.found.append(Life(name, size_bytes, begin + k, begin + k))
        self.found += made.values()
        for ref, own in given.items():
            if own is not None:
                own.until(begin + piece.last.get(ref, -1))
        self.now += len(graph.nodes) + 1
        rest = [g for g in chunk.pieces(order[order.index(action.kind) + 1 :]) if g is not None]
        later = frozenset[str]().union(*(chunk.taken(g) for g in rest))
        self.values[work] = {name: life for name, life in held.items() if name in later}
        self._route(action, piece, given | made)

    def _keep_buffers(self, work: Work, chunk: StageGraphs) -> None:
        """What a later piece reads of the buffers that a forward writes is copied before."""
        written, inputs = chunk.written, {i.name: i for i in chunk.forward.inputs}
        for graph in chunk.pieces(self.orders[work][1:]):
            for item in graph.inputs if graph else ():
                if item.target in written and item.name not in self.values[work]:
                    life = self._new(f"copy of {item.name}", inputs[item.name].spec.size_bytes)
                    self.values[work][item.name] = life

    def _sum_tangents(self, work: Work, chunk: StageGraphs) -> None:
        specs = chunk.forward.specs()
        sizes = {o.name: specs[o.ref].size_bytes for o in chunk.forward.outputs}
        for name, parts in self.tangents.pop(work, {}).items():
            total = parts[0]
            for part in parts[1:]:
                for one in (total, part):
                    if one is not None:
                        one.until(self.now)
                total = self._new(f"gradient of {name} {work[1]}", sizes[name])
            self.values[work][name] = total

    def _given(
        self, action: Action, piece: _Piece, held: Mapping[str, Life | None]
    ) -> dict[Ref, Life | None]:
        """The memory of a piece's inputs; what no one has handed over is made for it."""
        found: dict[Ref, Life | None] = {}
        for item in piece.graph.inputs:
            if item.key in held:
                found[Ref(item.name)] = held[item.key]
            elif item.kind is InputKind.TANGENT:
                name = f"{action} {item.name}"
                found[Ref(item.name)] = self._new(name, item.spec.size_bytes)
        return found

    def _route(self, action: Action, piece: _Piece, memory: Mapping[Ref, Life | None]) -> None:
        """Hands on what a piece has made."""
        work, messages = (action.stage, action.micro_batch), exchanged(self.chunks[action.stage])
        for out in piece.graph.outputs:
            life = memory.get(piece.home[out.ref])
            is_grad = out.kind is OutputKind.GRADIENT
            if life is not None:
                life.until(self.now)  # all outputs are there until the graph has returned
            if out.kind is OutputKind.SAVED:
                self.values[work][out.name] = life
            elif out.kind is OutputKind.ACTIVATION or (is_grad and out.name in messages):
                self.outgoing[(*work, out.name, is_grad)] = life
            elif life is not None and out.kind is OutputKind.WAIST:
                self.waist.append(life)

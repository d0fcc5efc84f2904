"""The compiled graphs of one stage: one for each kind of compute that a Program asks of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from merakc.ir.graph import Graph, Input, InputKind, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import ActionKind, Chunk, Program
from merakc.kernels.ops import returns_view
from merakc.runtime.codegen import NO_HOOKS, Compiled, Hooks, compile_graph
from merakc.runtime.sharded_state import ShardedState

Work = tuple[int, int]  # stage, micro-batch


@dataclass(frozen=True, slots=True)
class Piece:
    """A graph of a chunk, compiled. `owned` are its gradients in memory of their own.

    `leaves` are the keys of what later pieces of the micro-batch take; all else that the
    micro-batch holds is let go of while this one runs. `given` are the inputs that it is called
    with and `returned` the outputs that come back: all but sharded parameters and their gradients.
    """

    graph: Graph
    run: Compiled
    owned: frozenset[str]
    leaves: frozenset[str]
    given: tuple[Input, ...]
    returned: tuple[Output, ...]


class Stage:
    """One stage of a rank: its chunk, and its pieces as a Program runs them.

    `rewritten` are the buffers of which a micro-batch keeps the value from before its forward,
    since a later piece reads them and the forward writes them.
    """

    def __init__(
        self,
        number: int,
        chunk: Chunk,
        program: Program,
        device: torch.device,
        sharded: ShardedState | None = None,
    ) -> None:
        self.number, self.chunk, self.sharded = number, chunk, sharded
        self.targets = {i.name: i.target for i in chunk.forward.inputs}
        self.constants = {name: c.to(device) for name, c in chunk.forward.constants.items()}
        self.specs = message_specs(chunk)
        mine = [a for a in program.actions if a.stage == number and a.kind.is_compute]
        orders: dict[int, list[ActionKind]] = {}
        for action in mine:
            orders.setdefault(action.micro_batch, []).append(action.kind)
        self.orders = {j: tuple(order) for j, order in orders.items()}
        summed = [a for a in mine if a.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)]
        self.last_gradients = summed[-1] if summed else None
        compiled: dict[int, Piece] = {}
        self.pieces: dict[tuple[tuple[ActionKind, ...], ActionKind], Piece | None] = {}
        rewritten: set[str] = set()
        for order in dict.fromkeys(self.orders.values()):
            later: frozenset[str] = frozenset()
            graphs = chunk.pieces(order)
            for kind, graph in reversed(list(zip(order, graphs, strict=True))):
                if graph is None:  # nothing in the chunk requires a gradient
                    assert kind is not ActionKind.FORWARD, "a forward that was not made"
                    self.pieces[order, kind] = None
                    continue
                if id(graph) not in compiled:
                    compiled[id(graph)] = self._compile(graph, device)
                self.pieces[order, kind] = replace(compiled[id(graph)], leaves=later)
                if kind is not ActionKind.FORWARD:
                    later |= chunk.taken(graph)
                    rewritten |= {i.name for i in graph.inputs if i.target in chunk.written}
        self.rewritten = tuple(sorted(rewritten))
        outs = [o for p in compiled.values() for o in p.graph.outputs]
        grads = {self.targets.get(o.name) for o in outs if o.kind is OutputKind.GRADIENT}
        self.gradients = frozenset(t for t in grads if t)  # of which parameters it makes one

    def _compile(self, graph: Graph, device: torch.device) -> Piece:
        hooks = NO_HOOKS
        if self.sharded is not None:
            sharded, specs = self.sharded, graph.specs()
            sunk = {
                o.name: self.targets[o.name]
                for o in graph.outputs
                if o.kind is OutputKind.GRADIENT and sharded.sinks(self.targets[o.name])
            }
            hooks = Hooks(
                fetch=sharded.fetch,
                sink=sharded.sink,
                fetched={i.name: i.target for i in graph.inputs if i.target in sharded.bucket_of},
                sunk=sunk,
                place=sharded.place,
                placed={
                    o.name
                    for o in graph.outputs
                    if o.name in sunk and sharded.takes(sunk[o.name], specs[o.ref])
                },
            )
        return Piece(
            graph,
            compile_graph(graph, device, hooks),
            owned_gradients(graph),
            frozenset(),
            tuple(i for i in graph.inputs if i.name not in hooks.fetched),
            tuple(o for o in graph.outputs if o.name not in hooks.sunk),
        )

    def piece(self, kind: ActionKind, micro_batch: int) -> Piece | None:
        """What an action of the Program runs; None where there is nothing to differentiate."""
        return self.pieces[self.orders[micro_batch], kind]


def message_specs(chunk: Chunk) -> dict[str, TensorSpec]:
    """The shape of every value that a stage exchanges; a gradient has its value's shape."""
    specs = chunk.forward.specs()
    found = {i.name: i.spec for i in chunk.forward.inputs if i.kind is InputKind.ACTIVATION}
    for out in chunk.forward.outputs:
        if out.kind is OutputKind.ACTIVATION:
            found[out.name] = specs[out.ref]
    return found


def owned_gradients(graph: Graph) -> frozenset[str]:
    """The gradients in memory of their own: made by a call that returns no view, and no other
    output is the same value or a view of it.
    """
    memory = {Ref(i.name): {Ref(i.name)} for i in graph.inputs}
    made: set[Ref] = set()
    for node in graph.nodes:
        own = {Ref(node.name, k) for k in range(len(node.outputs))}
        if returns_view(node.op):
            shared = set().union(*(memory[r] for r in node.refs))
            memory |= dict.fromkeys(own, shared)
        else:
            memory |= {ref: {ref} for ref in own}
            made |= own
    times = Counter(ref for o in graph.outputs for ref in memory[o.ref])
    return frozenset(
        o.name
        for o in graph.outputs
        if o.kind is OutputKind.GRADIENT and o.ref in made and times[o.ref] == 1
    )

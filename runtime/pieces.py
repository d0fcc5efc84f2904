"""The compiled graphs of one stage: one for each kind of compute that a Program asks of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from merakc.analysis.accumulation import accumulated
from merakc.analysis.aliases import owned_outputs
from merakc.ir.graph import Graph, Input, InputKind, Output, OutputKind, TensorSpec
from merakc.ir.program import ActionKind, Program, StageGraphs
from merakc.ir.same import Same
from merakc.runtime.codegen import NO_HOOKS, Compiled, Hooks, compile_graph
from merakc.runtime.fused import Fuser
from merakc.runtime.sharded_state import ShardedState

Work = tuple[int, int]  # stage, micro-batch
Compiler = Callable[[Graph, torch.device, Hooks], Compiled]
NO_SPEC = TensorSpec((), torch.float32)


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the values that a piece returns go: their positions, by kind, with their names.

    `sent` says whether it is a gradient; `gradients` are of the parameters of those names, with
    whether they are in memory of their own.
    """

    losses: tuple[int, ...]
    results: tuple[tuple[int, str], ...]
    buffers: tuple[tuple[int, str], ...]
    saved: tuple[tuple[int, str], ...]
    waist: tuple[tuple[int, str], ...]
    sent: tuple[tuple[int, str, bool], ...]
    gradients: tuple[tuple[int, str, bool], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A graph of a chunk, compiled. `owned` are its gradients in memory of their own.

    `leaves` are the keys of what later pieces of the micro-batch take; all else that the
    micro-batch holds is let go of while this one runs. `given` are the inputs that it is called
    with and `returned` the outputs that come back: all but sharded parameters, their gradients, and
    those that its calls add up.
    `keys` are under what a micro-batch holds what is given, `held` its names in the rank's state,
    None of what a micro-batch brings.
    """

    graph: Graph
    run: Compiled
    owned: frozenset[str]
    leaves: frozenset[str]
    given: tuple[Input, ...]
    keys: tuple[str, ...]
    returned: tuple[Output, ...]
    held: tuple[str | None, ...]
    routes: Routes


class Stage:
    """One stage of a rank: its chunk, and its pieces as a Program runs them.

    `rewritten` are the buffers of which a micro-batch keeps the value from before its forward,
    since a later piece reads them and the forward writes them. With a `fuser`, runs of calls
    become kernels of their own; `compiler` compiles the graphs. `sums` are the gradients of a step
    so far that are in no bucket.
    """

    def __init__(
        self,
        number: int,
        chunk: StageGraphs,
        program: Program,
        device: torch.device,
        sharded: ShardedState | None = None,
        fuser: Fuser | None = None,
        compiler: Compiler = compile_graph,
    ) -> None:
        self.compiler = compiler
        self.number, self.chunk, self.sharded, self.fuser = number, chunk, sharded, fuser
        self.sums: dict[str, torch.Tensor] = {}
        self.targets = {i.name: i.target for i in chunk.forward.inputs}
        self.constants = {name: c.to(device) for name, c in chunk.forward.constants.items()}
        self.specs = message_specs(chunk)
        outputs = chunk.forward.outputs
        self.waist = frozenset(o.name for o in outputs if o.kind is OutputKind.WAIST)
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
                    rewritten |= {i.name for i in graph.inputs if chunk.rewrites(i)}
        self.rewritten = tuple(sorted(rewritten))
        for key, piece in self.pieces.items():
            if piece is not None:
                self.pieces[key] = replace(piece, held=tuple(map(self._held, piece.given)))
        outs = [o for p in compiled.values() for o in p.graph.outputs]
        grads = {self.targets.get(o.name) for o in outs if o.kind is OutputKind.GRADIENT}
        self.gradients = frozenset(t for t in grads if t)  # of which parameters it makes one

    def _compile(self, graph: Graph, device: torch.device) -> Piece:
        run = self.fuser.fuse(graph) if self.fuser else graph
        hooks = self._hooks(graph, run)
        owned = owned_outputs(graph)
        given = tuple(i for i in graph.inputs if i.name not in hooks.fetched)
        returned = tuple(o for o in graph.outputs if o.name not in hooks.sunk)
        return Piece(
            graph,
            self.compiler(run, device, hooks),
            owned & {o.name for o in graph.outputs if o.kind is OutputKind.GRADIENT},
            leaves=frozenset(),
            given=given,
            keys=tuple(i.key for i in given),
            returned=returned,
            held=(),
            routes=self._routes(returned, owned),
        )

    def _hooks(self, graph: Graph, run: Graph) -> Hooks:
        """Those of a graph, of which `run` is what is compiled."""
        targets = {
            o.name: self.targets[o.name]
            for o in graph.outputs
            if o.kind is OutputKind.GRADIENT and o.name not in self.specs
        }
        added = accumulated(run, targets).keys()
        sunk = {name: targets[name] for name in added}
        if self.sharded is None:
            return replace(NO_HOOKS, sink=self._sink, sunk=sunk, place=self._place, added=added)
        sharded, specs = self.sharded, graph.specs()
        of_bucket = {name: target for name, target in targets.items() if sharded.sinks(target)}
        values = {o.name: specs[o.ref] for o in graph.outputs}
        return Hooks(
            fetch=sharded.fetch,
            sink=self._sink,
            fetched={
                i.name: i.target
                for i in graph.inputs
                if i.kind is InputKind.PARAMETER and i.target in sharded.bucket_of
            },
            sunk=sunk | of_bucket,
            place=self._place,
            added={
                name
                for name in added
                if name not in of_bucket or sharded.takes(targets[name], values[name])
            },
        )

    def _place(self, name: str) -> tuple[torch.Tensor | None, bool]:
        """What a gradient of this parameter is added to, and whether anything is there."""
        if self.sharded is not None and self.sharded.sinks(name):
            return self.sharded.place(name)
        return self.sums.get(name), name in self.sums

    def _sink(self, name: str, gradient: torch.Tensor) -> None:
        """Takes a gradient of a bucket, or one that was added up by the call that made it."""
        if self.sharded is not None and self.sharded.sinks(name):
            self.sharded.sink(name, gradient)
        else:
            self.sums[name] = gradient

    def _held(self, item: Input) -> str | None:
        """The name in the rank's state of an input that no micro-batch brings."""
        kept = item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        own = item.name in self.constants or item.name in self.rewritten
        return item.target or item.name if kept and not own else None

    def _routes(self, returned: Sequence[Output], owned: Collection[str]) -> Routes:
        places: dict[OutputKind, list[tuple[int, str]]] = {kind: [] for kind in OutputKind}
        sent, gradients = [], []
        for k, out in enumerate(returned):
            is_grad = out.kind is OutputKind.GRADIENT
            if out.kind is OutputKind.ACTIVATION or (is_grad and out.name in self.specs):
                sent.append((k, out.name, is_grad))
            elif is_grad:
                gradients.append((k, self.targets[out.name], out.name in owned))
            else:
                places[out.kind].append((k, out.name))
        return Routes(
            tuple(k for k, _ in places[OutputKind.LOSS]),
            tuple(places[OutputKind.RESULT]),
            tuple(places[OutputKind.BUFFER]),
            saved=tuple(places[OutputKind.SAVED]),
            waist=tuple(places[OutputKind.WAIST]),
            sent=tuple(sent),
            gradients=tuple(gradients),
        )

    def let_go(self, same: Same) -> None:
        """Lets go of the graphs, but for what the forward takes and gives; with the `same` values
        as other stages have.
        """
        self.chunk = StageGraphs(self.chunk.forward.without_nodes(same), None)
        self.gradients = same(self.gradients)
        self.targets = same.mapping(self.targets)
        for key, piece in self.pieces.items():
            if piece is not None:
                self.pieces[key] = _light(piece, same)

    def piece(self, kind: ActionKind, micro_batch: int) -> Piece | None:
        """What an action of the Program runs; None where there is nothing to differentiate."""
        return self.pieces[self.orders[micro_batch], kind]


def _light(piece: Piece, same: Same) -> Piece:
    """The piece without its graph. What an earlier piece has kept for it comes as it was made: its
    shape is not asked for.
    """

    def light(item: Input) -> Input:
        if item.kind is InputKind.SAVED:
            item = replace(item, spec=NO_SPEC)
        fixed = (InputKind.SAVED, InputKind.PARAMETER, InputKind.BUFFER)
        return same(item) if item.kind in fixed else item

    return replace(
        piece, graph=Graph((), (), ()), given=tuple([light(i) for i in piece.given]),
        owned=same(piece.owned), leaves=same(piece.leaves), keys=same(piece.keys),
        returned=same(piece.returned), held=same(piece.held), routes=same(piece.routes),
    )  # fmt: skip


def message_specs(chunk: StageGraphs) -> dict[str, TensorSpec]:
    """The shape of every value that a stage exchanges; a gradient has its value's shape."""
    specs = chunk.forward.specs()
    found = {i.name: i.spec for i in chunk.forward.inputs if i.kind is InputKind.ACTIVATION}
    for out in chunk.forward.outputs:
        if out.kind is OutputKind.ACTIVATION:
            found[out.name] = specs[out.ref]
    return found

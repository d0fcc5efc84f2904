"""Records the forward of one micro-batch as a `Graph`, on fake tensors.

The model's Python runs as it is: control flow, kwargs and module hooks need no support. No weight
is ever materialised.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.costs.work.flops import node_flops
from merakc.errors import MerakError, RecordError
from merakc.frontend.aside import Aside
from merakc.frontend.asking import SymbolsNeededError
from merakc.frontend.calls.around import check_around
from merakc.frontend.calls.forms import new_fake_mode
from merakc.frontend.calls.generators import DrawnError
from merakc.frontend.calls.refusals import check_modules
from merakc.frontend.carried import Leftovers, check_remembered
from merakc.frontend.contexts import Slot, clocks_ahead, put_fakes, untouched
from merakc.frontend.hits.alike import check_turns
from merakc.frontend.left import Left, left_by
from merakc.frontend.opaque import Fallbacks, UntraceableError
from merakc.frontend.python.compared import Compared
from merakc.frontend.python.kinds import usual_types
from merakc.frontend.python.plain_tensors import check_identities, check_memory
from merakc.frontend.python.sets import goes_through_sets, in_needed_order
from merakc.frontend.python.state import PythonState
from merakc.frontend.recorder import Recorder
from merakc.frontend.regions import Region
from merakc.frontend.values.outside import LossAndOutputs
from merakc.frontend.values.reads import Reads, ValuesNeededError
from merakc.frontend.values.symbols import Answer, Symbols
from merakc.ir.graph import Graph, OutputKind
from merakc.kernels.opaque import OPAQUE, find

# What may run as it is of a forward's arithmetic before shapes are settled by the batch, for each
# of whose answers a step is then compiled.
MUCH_OPAQUE = 0.2
# One thread at a time: what a forward is told of types is told to the whole process.
_ONE = threading.RLock()


@dataclass(frozen=True)
class Recording:
    """A recorded forward.

    `outputs` are the leaves of what the forward returned: the name of a graph output, the plain
    value where the leaf is no tensor, or None where it is neither; `structure` puts them together
    again; `numbers` are the outputs that are numbers in Python and tensors in the graph. `aliases`
    maps each further name of a tied parameter to the name that the graph uses. The graph is right
    for batches that answer what it `reads` as this one did, and for losses that are finite where
    lines ask whether numbers are: the lines `finite`. `full` is the graph with what the forward
    does `aside`, if it does; `left` is what it leaves in Python. Whether it `checkpoints` says if
    it calls torch's functions that recompute. `asks` is the first line of the user's that was told
    that something requires a gradient.
    """

    graph: Graph
    outputs: tuple[Any, ...]
    structure: pytree.TreeSpec
    aliases: Mapping[str, str]
    model_name: str
    numbers: frozenset[str] = frozenset()
    reads: Reads | None = None
    finite: tuple[str, ...] = ()
    aside: Aside = field(default_factory=Aside)
    full: Graph | None = None
    left: tuple[Left, ...] = ()
    checkpoints: bool = False
    asks: str = ""

    @property
    def everything(self) -> Graph:
        """The graph with what the forward does aside."""
        return self.full or self.graph

    @property
    def has_loss(self) -> bool:
        """Whether the forward returns a loss for this batch."""
        return any(o.kind is OutputKind.LOSS for o in self.graph.outputs)

    @property
    def is_beside(self) -> bool:
        """Whether the loss is computed beside the model."""
        return self.structure.context is LossAndOutputs


def record(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parameter_dtype: torch.dtype | None = None,
    told: Sequence[Answer] = (),
    *,
    settling: bool = False,
    repeated: bool = True,
    compared: Compared | None = None,
) -> Recording:
    """Records `model(*args, **kwargs)`, in the mode (train or eval) that the model is in.

    A second forward has to be the same. One that changes nothing in Python need not be `repeated`
    where it was for another batch, or where others that were `compared` explain it.

    Its floating parameters are recorded in `parameter_dtype`, if one is given. What the forward
    reads of a batch without values it is `told`, in the order in which it asks. With `settling`,
    shapes behind parameters are those that this batch says. A module whose control flow depends on
    the data becomes one node, which runs it as it is. Raises `RecordError`, with the user's line,
    where that would be the model itself, for random ops that cannot be reproduced on every layout,
    and for whatever a graph cannot say: writes to parameters, hooks on gradients, higher-order ops.
    """
    check_around("auto_parallel")
    check_modules(model)
    fallbacks = Fallbacks(dict(model.named_modules()))
    compared = Compared() if compared is None else compared
    how = _How(fallbacks, parameter_dtype, tuple(told), repeated, compared, settling=settling)
    with _ONE:
        return _recorded(model, args, kwargs, how)


def _recorded(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], how: _How
) -> Recording:
    """The first attempt that succeeds."""
    while True:
        try:
            return _less_opaque(_record(model, args, kwargs, how), model, args, kwargs, how)
        except DrawnError:
            how.watched = True
        except ValuesNeededError:
            raise
        except (SymbolsNeededError, RecordError) as error:
            how.otherwise(error)


def _less_opaque(
    made: Recording,
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    how: _How,
) -> Recording:
    """The recording; where much of it runs as it is, one of which less does, if there is one: with
    the sizes that this batch says.
    """
    share = opaque_share(made.graph)
    if share <= MUCH_OPAQUE or not how.reading or how.settling:
        return made
    try:
        other = _record(model, args, kwargs, replace(how, settling=True))
    except (MerakError, DrawnError, SymbolsNeededError):
        return made
    return other if opaque_share(other.graph) < share else made


def opaque_share(graph: Graph) -> float:
    """The share of the flops of a forward that opaque modules compute, but for turns of loops over
    what was hit, which no batch says.
    """
    calls = [find(n.args[-1]) for n in graph.nodes if n.op == OPAQUE]
    turns = [c for c in calls if isinstance(c.forward, Region) and c.forward.skips]
    as_it_is = sum(c.flops for c in calls) - sum(c.flops for c in turns)
    if not as_it_is:
        return 0.0
    specs = graph.specs()
    total = sum(node_flops(n, specs) for n in graph.nodes if n.op != OPAQUE)
    return as_it_is / max(total + as_it_is, 1)


@dataclass(slots=True)
class _How:
    """How a forward is recorded: which modules are kept whole, whether each is `watched` as it
    draws, whether libraries are told that the model is `exported`, whether Python may be `reading`
    values, and whether sizes that the batch says are `settling` the shapes behind them.

    They are not told at first: what a library does in eager is what is trained. Exported ones read
    less: what follows from values is asked for where neither does without. `eager` is why eager was
    left: it speaks, and libraries are never told again, where an exported forward fails for
    anything else than values.
    """

    fallbacks: Fallbacks
    parameter_dtype: torch.dtype | None
    told: tuple[Answer, ...]
    repeated: bool
    compared: Compared
    watched: bool = False
    exported: bool = False
    reading: bool = False
    settling: bool = False
    exports: bool = True
    asked: bool = False
    eager: Exception | None = None

    def otherwise(self, error: Exception) -> None:
        """The next way, after an attempt that has failed. Raises the error where there is none."""
        self.asked |= isinstance(error, SymbolsNeededError)
        if self.exported and not isinstance(error, (SymbolsNeededError, UntraceableError)):
            assert self.eager is not None
            self.exported, self.exports, error = False, False, self.eager
        if not self.exported and self.exports:
            self.exported, self.eager = True, error
        elif self.asked and not self.reading:
            self.reading, self.exported = True, False
        elif self.reading and not self.settling:
            self.settling, self.exported = True, False
        elif isinstance(error, UntraceableError):
            self.fallbacks.add(error)
        else:
            raise error


def _record(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], how: _How
) -> Recording:
    """One attempt."""
    env = Symbols(lambda number: current[-1].answer(number)) if how.reading else None
    fake_mode = new_fake_mode(env)
    modes = {"watched": how.watched, "exported": how.exported, "settling": how.settling}
    new = partial(Recorder, fake_mode, **modes, told=how.told, loose=how.fallbacks.loose)
    first, second = new(), new()
    current: list[Recorder] = []
    with untouched(model, how.compared.state_of(model)) as state:
        slots = put_fakes(model, fake_mode, how.parameter_dtype)
        real = {slot.name: slot.real for slot in slots}
        check_identities(real, state.held())
        first.views = second.views = how.compared.views
        first.views.find(slots, (tensor for _, tensor in state.tensors()))

        def run(recorder: Recorder) -> Any:
            current.append(recorder)
            return _run(recorder, model, slots, args, kwargs, how.fallbacks)

        outputs, structure, aside = run(first)
        graph = first.graph().pruned()
        _check_memory(graph, real, state)
        changes = check_remembered(state)
        left = tuple(left_by(changes))
        if changes or (how.repeated and not how.compared.explain(graph)):
            leftovers = Leftovers(changes, first)
            torch.clear_autocast_cache()
            second.leftovers, second.was_constant = leftovers.tensors, leftovers.is_constant
            with clocks_ahead():
                run(second)
            leftovers.check(graph, second.graph().pruned(), state.changes(), second.read_leftovers)
            check_turns(second, new, run, lambda: leftovers.check_left(state.changes()))
            how.compared.add(graph)
    aliases = aliases_of(model)
    if goes_through_sets(model):
        graph = in_needed_order(graph)
    graph.verify()
    made = Recording(
        without_aside(graph) if aside else graph, outputs, structure, aliases, model._get_name(),  # type: ignore[no-untyped-call]
        numbers=frozenset(first.numbers), reads=first.reader.reads(),
        finite=first.guards.lines(first.outputs), aside=aside, full=graph if aside else None,
        left=left, checkpoints=first.checkpoints, asks=first.asks,
    )  # fmt: skip
    for recorder in (*current, second):  # which hold themselves: it takes long to find that out
        vars(recorder).clear()
    return made


def _check_memory(graph: Graph, real: Mapping[str, torch.Tensor], state: PythonState) -> None:
    """Raises `RecordError` where what a step changes shares memory with other tensors."""
    trained = {name for name, tensor in real.items() if tensor.requires_grad}
    written = {o.name for o in graph.outputs if o.kind is OutputKind.BUFFER}
    check_memory({**dict(state.tensors()), **real}, trained | written)


def without_aside(graph: Graph) -> Graph:
    """A graph of the forward's own outputs alone."""
    outputs = tuple(o for o in graph.outputs if o.kind is not OutputKind.ASIDE)
    return replace(graph, outputs=outputs).pruned().without_unread_inputs()


def _run(
    recorder: Recorder,
    model: torch.nn.Module,
    slots: Sequence[Slot],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fallbacks: Fallbacks,
) -> tuple[tuple[Any, ...], pytree.TreeSpec, Aside]:
    """Runs the forward under a recorder; the outputs, and what is aside, as in a `Recording`."""
    leaves, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    for slot in slots:
        slot.states[slot.key] = slot.fake
        recorder.state_input(slot)
    with contextlib.ExitStack() as stack:
        for path, cause in fallbacks.causes.items():
            if path in fallbacks.loose:
                kept = recorder.keeping_loose(path, fallbacks.loose[path], cause)
            else:
                kept = recorder.keeping_whole(path, fallbacks.modules[path], cause)
            stack.enter_context(kept)
        flat = [recorder.batch_input(path, leaf) for path, leaf in leaves]
        fake_args, fake_kwargs = pytree.tree_unflatten(flat, spec)
        recorder.watch_batch(fake_args, fake_kwargs)
        with usual_types(model), recorder.running(model):
            out = model(*fake_args, **fake_kwargs)
    found = *recorder.finish(out), recorder.set_aside()
    recorder.states.clear()  # the model's own tensors, which would live as long as Python likes
    return found


def aliases_of(model: torch.nn.Module) -> dict[str, str]:
    """Further names of tied parameters and shared buffers -> the first name."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
    return found

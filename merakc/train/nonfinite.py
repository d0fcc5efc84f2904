"""Where the first number of a step that is not finite comes from: the step is run once more, and
every value of its graphs is looked at as it is made.

A value may be infinite on purpose, as a mask is. So only values are told of that what a piece hands
on was made from, and only where an op has made NaN of none, or an infinity of finite numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from merakc.errors import NonfiniteError
from merakc.ir.graph import Graph, Input, InputKind, Node, OutputKind, Ref
from merakc.ir.program import Action, ActionKind
from merakc.runtime.codegen import Compiled, Hooks, compile_graph
from merakc.runtime.executor import Executor, Step
from merakc.runtime.groups import together
from merakc.runtime.head import HeadRunner
from merakc.train.besides import Nothing
from merakc.train.compiled_step import CompiledStep
from merakc.train.steps import Steps

Tensors = dict[str, torch.Tensor]
# What a forward hands on; what it keeps for the backward may be infinite, and finite again there.
HANDED_ON = (OutputKind.LOSS, OutputKind.ACTIVATION, OutputKind.WAIST)
BACKWARD = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
# What the ranks hold or are given. Of a batch, a buffer or a constant infinities may be meant.
HELD = (
    InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT, InputKind.BATCH, InputKind.KNOWN,
)  # fmt: skip
Place = tuple[int, ...]


@torch.no_grad()
def find_nonfinite(
    steps: Steps, step: CompiledStep, args: Sequence[Any], kwargs: Mapping[str, Any], number: int
) -> str | None:
    """The first module, in the order of the forward and then of the backward, of which this rank's
    batch or another's makes something that is not finite: the same on every rank; None where all
    is finite. Collective. Nothing that the ranks hold is changed.

    The step draws by this number.
    """
    seen = _Seen()
    step = steps.with_graphs(step, args, kwargs)
    old = step.executor
    head = old.head and HeadRunner(
        old.head.head, old.head.chunk, old.head.layout, steps.device, old.head.group,
        compiler=seen.compiled,
    )  # fmt: skip
    looked = _Looked(
        old.program, step.chunks, steps.state, steps.device, reduce=old.reduce,
        channels=old.channels, timeout_s=old.timeout_s, sharded=old.sharded, head=head,
        late=old.late, compiler=seen.compiled,
    )  # fmt: skip
    looked.seen = seen
    kept = {name: steps.state[name].clone() for name in step.written}
    result = steps.run(replace(step, executor=looked, besides=Nothing()), args, kwargs, number)
    for name, value in kept.items():
        steps.state[name].copy_(value)
    bad = [name for name, g in result.gradients.items() if not g.isfinite().all()]
    dp, _, tp = steps.groups.coordinates
    found = sorted((each.place, each.told) for each in seen.found)[:1]
    everyone = together(lambda: ([((*p, dp, tp), told) for p, told in found], sorted(bad)[:1]))
    firsts = [one for own, _ in everyone for one in own]
    if firsts:
        return min(firsts)[1]
    names = [name for _, own in everyone for name in own]
    return f"the sum of gradients of parameter '{min(names)}'" if names else None


def raise_nonfinite(
    steps: Steps,
    step: CompiledStep,
    loss: torch.Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    number: int,
) -> NoReturn:
    """Raises `NonfiniteError`, the same on every rank, for the step that has run; collective."""
    found = find_nonfinite(steps, step, args, kwargs, number)
    steps.taken += 1
    what = f"the loss is {loss.item()}" if not loss.isfinite() else "gradients are not finite"
    first = f"the first that is not finite is of {found}" if found else "a second run is finite"
    raise NonfiniteError(
        f"step {steps.taken - 1}: {what}, and no rank gets gradients; {first}. Look at this batch, "
        "the learning rate and that module; auto_parallel(..., on_nonfinite='skip') leaves such "
        "steps out, 'ignore' hands their gradients out as they are"
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """Something that is not finite: its place in the order of a step, and what is told of it."""

    place: Place
    told: str


@dataclass(eq=False)
class _Seen:
    """What was found so far, and the action that runs."""

    found: list[_Found] = field(default_factory=list)
    action: Action | None = None

    def compiled(self, graph: Graph, device: torch.device, hooks: Hooks) -> Compiled:
        """The function of a graph, which looks at every value."""
        kinds: dict[Ref, bool] = {}  # of values that are not finite, whether there is a NaN

        def tell(ref: Ref, value: Any) -> None:
            for k, each in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if not isinstance(each, torch.Tensor):
                    continue
                if each.is_floating_point() and each.itemsize == 1:
                    each = each.float()  # torch does not ask numbers of eight bits
                if not each.isfinite().all():
                    kinds[Ref(ref.node, ref.index + k)] = bool(each.isnan().any())

        run = compile_graph(graph, device, hooks, tell)

        def look(given: list[Any]) -> list[Any]:
            kinds.clear()
            outs = run(given)
            if kinds:
                self._note(graph, kinds)
            return outs

        return look

    def _note(self, graph: Graph, kinds: Mapping[Ref, bool]) -> None:
        """Notes the first origin of what the graph hands on and is not finite."""
        assert self.action is not None, "a graph runs in an action"
        action = self.action
        back = any(o.kind is OutputKind.GRADIENT for o in graph.outputs)
        if not back and action.kind in BACKWARD:
            return
        ends = {o.ref for o in graph.outputs if back or o.kind in HANDED_ON} & kinds.keys()
        phase = 2 if action.kind in BACKWARD else 1 if action.kind is ActionKind.HEAD else 0
        order = -action.stage if phase == 2 else action.stage
        for meant, position, what in _origins(graph, kinds, ends):
            way = "backward" if back else "forward"
            told = f"{what}, in the {way} of micro-batch {action.micro_batch}"
            place = int(meant), phase, int(back), order, position, action.micro_batch
            self.found.append(_Found(place, told))


def _origins(
    graph: Graph, kinds: Mapping[Ref, bool], ends: set[Ref]
) -> Iterator[tuple[bool, int, str]]:
    """Where the `ends` are from: whether it may be meant so, its position, and what it is."""
    wanted = set(ends)
    for position in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[position]
        made = [ref for ref in wanted if ref.node == node.name]
        if made:
            read = [ref for ref in node.refs if ref in kinds]
            wanted.update(read)
            if any(_arises(node, kinds[ref], [kinds[r] for r in read]) for ref in made):
                yield False, position, _told(node)
    for item in graph.inputs:
        if Ref(item.name) in wanted and item.kind in HELD:
            has_nan = kinds[Ref(item.name)]
            meant = not has_nan and item.kind is not InputKind.PARAMETER
            yield meant, -1, _held(item, has_nan)


def _arises(node: Node, has_nan: bool, read: Sequence[bool]) -> bool:
    """Whether a node has made its value otherwise than by handing on what it reads, or is told."""
    if has_nan:
        return not any(read)
    return not read and not _says_infinity((node.args, node.kwargs))


def _says_infinity(value: Any) -> bool:
    if isinstance(value, tuple) and not isinstance(value, Ref):
        return any(map(_says_infinity, value))
    return isinstance(value, float) and value in (float("inf"), float("-inf"))


def _told(node: Node) -> str:
    op = node.op.removeprefix("aten.").partition(".")[0]
    where = f"module '{node.module}'" if node.module else "the model's own forward"
    return f"{where}, {op}" + (f" at {node.source}" if node.source else "")


def _held(item: Input, has_nan: bool) -> str:
    name = item.target or item.name
    return f"{item.kind} '{name}', which holds {'NaN' if has_nan else 'an infinity'}"


class _Looked(Executor):
    """Its steps say which action runs."""

    seen: _Seen

    def step(
        self, micro_batches: Sequence[Tensors], known: Tensors | None, *, record: bool
    ) -> Step:
        """One step, to be run."""
        return _LookedStep(self, micro_batches, known, record=record)


class _LookedStep(Step):
    of: _Looked

    def compute(self, action: Action) -> None:
        """Runs a piece of a chunk on a micro-batch."""
        self.of.seen.action = action
        super().compute(action)

    def couple(self, stage: int) -> None:
        """Runs what couples the samples of the batch."""
        self.of.seen.action = Action(ActionKind.HEAD, stage)
        super().couple(stage)

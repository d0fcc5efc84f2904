"""Whether what no rule can look into computes each sample by itself, seen with numbers.

Modules that run as they are and custom functions are run on random arguments, forward and backward,
on parts and on the whole batch. What Python asks of values on the way, `if h.mean() > 0.5`, says
more than that: numbers at random may all lie on one side of a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from merakc.errors import failure
from merakc.frontend.opaque import ModuleCall
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Node, Ref, TensorSpec, map_refs
from merakc.kernels.opaque import OPAQUE, Call, autograd_reachable, drawing, find
from merakc.passes.batches.own_rules import Place

# Arithmetic of the whole batch, and elements of a function's values, up to which they are tried:
# about a second on a CPU.
MOST_FLOPS, MOST_ELEMENTS = 2 * 10**10, 1 << 23
# What the sizes of larger ones become: of sequences, and of a function's matrices.
FEW, MANY = 4, 256
SEVERAL = "computes over several samples"
# What parts may differ by, relative to the largest number: they call kernels of other shapes.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
LIMIT_OF_HALF, NEAR_ZERO = 2e-2, 1e-2
# Gradients of all sizes: a backward that clips them shows it at some.
SCALES = (1.0, 1e-4, 1e4)
NUDGE = 1e-2  # of a sample's values, for its share in a question to be seen
ASKS = "aten._local_scalar_dense.default"
# Whether numbers are finite, which guards ask of all samples together.
GUARDS = ("aten.isnan.default", "aten.isinf.default", "aten.isfinite.default")


# The shape of an argument, and where its samples stand.
_Sized = tuple[tuple[int, ...], Rows | None]


@dataclass
class _Trial:
    """A call for some number of samples: its arguments, and how they make what it returns.

    `specs` are those of what it returned the last time.
    """

    run: Callable[[Sequence[Tensor], int], list[Tensor]]
    refs: tuple[Ref, ...]
    specs: list[TensorSpec] = field(default_factory=list)


@dataclass(frozen=True)
class _Values:
    """Random arguments of all samples of a trial, in parts of so many; `trained` have gradients."""

    whole: list[Tensor]
    rows_of: list[Rows | None]
    trained: list[bool]
    samples: int
    total: int

    def parts(self, values: Sequence[Tensor]) -> list[list[Tensor]]:
        """What the parts have of arguments; some samples may be in none."""
        firsts = range(0, self.total - self.samples + 1, self.samples)
        pairs = list(zip(values, self.rows_of, strict=True))
        return [[r.take(v, k, self.samples) if r else v for v, r in pairs] for k in firsts]


def why_not_apart(place: Place) -> str:
    """Why it is not seen that parts of random arguments give the parts of what all of them give,
    values and gradients; empty where it is seen.
    """
    mine, other = _trial(place.part, place.node), _trial(place.part, place.twin)
    specs, grads = place.part.specs(), place.part.grad_values()
    trained = [r in grads for r in mine.refs]
    given = [(specs[r].shape, place.states[r].rows) for r in mine.refs]
    large, module = _is_large(place), place.node.op == OPAQUE
    samples, total = (1, 2) if large else (place.samples, place.total)
    why = "is too large to be tried"
    for sizes in _smaller(given, module=module) if large else [given]:
        made = [
            TensorSpec(rows.sized(shape, total) if rows else shape, specs[r].dtype)
            for r, (shape, rows) in zip(mine.refs, sizes, strict=True)
        ]
        try:
            with _disable_current_modes(), autograd_reachable():
                rows_of = [rows for _, rows in sizes]
                values = _Values(_random(made), rows_of, trained, samples, total)
                return _why_not(mine, other, values, module=module)
        except Exception as error:  # of the user's own code, given what it is not made for
            if not large:
                why = f"fails on random numbers ({failure(error)})"
    return why


def _why_not(mine: _Trial, other: _Trial, values: _Values, *, module: bool) -> str:
    """The same for arguments that are given."""
    with torch.no_grad():
        if not _alike(other.run(values.whole, 0), other.run(values.whole, 1)):
            return "draws random numbers, which parts would draw otherwise"
        grouped = _grouped(values.whole, values.rows_of, values.total)
        for given in (values.whole, grouped):
            together = other.run(given, 0)
            for k, part in enumerate(values.parts(given)):
                if not _alike(mine.run(part, 0), _of_part(mine, together, k)):
                    return SEVERAL
    apart = _same_gradients(mine, other, values) and not (
        module and _asks_of_several(other, values)
    )
    return "" if apart else SEVERAL


def _trial(graph: Graph, node: Node) -> _Trial:
    """The call of a node, as a function of its arguments."""
    refs = node.args[0] if node.op == OPAQUE else tuple(dict.fromkeys(node.refs))

    def run(values: Sequence[Tensor], seed: int) -> list[Tensor]:
        with drawing((), seed, ()):
            if node.op == OPAQUE:
                call = find(node.args[-1])
                with call.holding(values):
                    out: Any = _results(call, values)
            else:
                given = dict(zip(refs, values, strict=True))
                out = graph.functions[node.op](*map_refs(node.args, given.__getitem__))
        outs = out if isinstance(out, (tuple, list)) else (out,)
        found = [x for x, spec in zip(outs, node.outputs, strict=True) if spec is not None]
        trial.specs[:] = [TensorSpec(tuple(x.shape), x.dtype) for x in found]
        return found

    trial = _Trial(run, refs)
    return trial


def _results(call: Call, values: Sequence[Tensor]) -> Sequence[Tensor]:
    """What a call makes of values, which may be of other sizes than what was recorded."""
    forward = call.forward
    return forward.run(values).tensors if isinstance(forward, ModuleCall) else forward(values)


def _is_large(place: Place) -> bool:
    if place.node.op == OPAQUE:
        return find(place.twin.args[-1]).flops > MOST_FLOPS
    whole = place.whole.specs()
    return sum(whole[ref].numel for ref in (*place.twin.refs, *place.twin.made)) > MOST_ELEMENTS


def _smaller(given: Sequence[_Sized], *, module: bool) -> Iterator[list[_Sized]]:
    """Smaller arguments to try what is too large on: of a module, whose parameters fix most sizes,
    one other size of its samples at a time, as of a sequence; of a function all large ones.
    """
    if not module:
        yield [
            (tuple(MANY if d > MANY and d % MANY == 0 else d for d in shape), rows)
            for shape, rows in given
        ]
        return
    beside = [d for shape, rows in given if rows
              for d in (rows.inner, *shape[: rows.dim], *shape[rows.dim + 1 :])]  # fmt: skip
    for size in dict.fromkeys(d for d in beside if d > FEW):
        yield [
            (
                tuple(FEW if rows and d == size else d for d in shape),
                replace(rows, inner=FEW) if rows and rows.inner == size else rows,
            )
            for shape, rows in given
        ]


def holds_batch_norm(node: Node) -> bool:
    """Whether the module of a call normalises over the samples of its part, by convention."""
    if node.op != OPAQUE:
        return False
    call = find(node.args[-1]).forward
    return isinstance(call, ModuleCall) and any(
        isinstance(m, _BatchNorm) and m.training for m in call.module.modules()
    )


# ---------------------------------------------------------------------- values and gradients


def _of_part(mine: _Trial, together: Sequence[Tensor], number: int) -> list[Tensor]:
    """What a part has of the whole batch's values; a buffer is the same in all parts."""
    return [
        value
        if tuple(value.shape) == spec.shape
        else value[number * spec.shape[0] : (number + 1) * spec.shape[0]]
        for value, spec in zip(together, mine.specs, strict=True)
    ]


def _same_gradients(mine: _Trial, other: _Trial, values: _Values) -> bool:
    """Whether the parts' gradients of samples are those of the whole, and add up to those of
    constants, for gradients of all sizes and of any of the results: a backward may do otherwise
    where one has none.
    """
    parts, rows_of, trained = values.parts(values.whole), values.rows_of, values.trained
    generator = torch.Generator().manual_seed(1)
    every_one = frozenset(range(len(mine.specs)))
    alone = {frozenset({k}) for k in every_one}
    some = {*alone, *(every_one - one for one in alone)} - {every_one, frozenset()}
    for scale, reached in [*((s, every_one) for s in SCALES), *((1.0, s) for s in some)]:
        given = [[scale * _numbers(s, generator) for s in mine.specs] for _ in parts]
        every = [
            _filled(torch.cat(own), s) if own[0].shape != s.shape else torch.stack(own).sum(0)
            for own, s in zip(zip(*given, strict=True), other.specs, strict=True)
        ]
        whole = _gradients(other, values.whole, every, trained, reached)
        covered = len(parts) * values.samples
        wanted = [r.take(g, 0, covered) if r else g for r, g in zip(rows_of, whole, strict=True)]
        each = zip(
            *(_gradients(mine, p, g, trained, reached) for p, g in zip(parts, given, strict=True)),
            strict=True,
        )
        joined = [
            rows.join(own) if rows else torch.stack(own).sum(0)
            for rows, own in zip(rows_of, each, strict=True)
        ]
        if not _alike(joined, wanted):
            return False
    return True


def _filled(value: Tensor, spec: TensorSpec) -> Tensor:
    """The value with zeros for the samples that no part holds."""
    rest = (spec.shape[0] - value.shape[0], *spec.shape[1:])
    return torch.cat([value, value.new_zeros(rest)])


def _numbers(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    found = torch.randn(spec.shape, generator=generator)
    return found.to(spec.dtype) if spec.dtype.is_floating_point else found


def _gradients(
    trial: _Trial,
    values: Sequence[Tensor],
    grads: Sequence[Tensor],
    trained: Sequence[bool],
    reached: Collection[int],
) -> list[Tensor]:
    """The gradients of all arguments, by those of the results that are `reached`; zeros of those
    that have none.
    """
    with torch.enable_grad():
        own = [v.detach().requires_grad_(t) for v, t in zip(values, trained, strict=True)]
        outs = zip(trial.run(own, 0), grads, strict=True)
        pairs = [(o, g) for k, (o, g) in enumerate(outs) if k in reached and o.requires_grad]
        leaves = [x for x in own if x.requires_grad]
        if not pairs or not leaves:
            return [torch.zeros_like(v) for v in own]
        heads, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(heads, leaves, given, allow_unused=True))
        return [
            g if x.requires_grad and (g := next(found)) is not None else torch.zeros_like(x)
            for x in own
        ]


def _alike(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether values are the same within rounding, of which there is more where others are large:
    what is zero in theory is none of a few millionths of these.
    """
    sizes = [_largest(x) for x in others]
    for one, two, size in zip(ones, others, sizes, strict=True):
        limit = LIMITS.get(one.dtype, LIMIT_OF_HALF) * max(size, NEAR_ZERO * max(sizes))
        exact = not (one.is_floating_point() or one.is_complex())
        same = torch.equal(one, two) if exact else _within(one, two, limit)
        if not same:
            return False
    return True


def _within(one: Tensor, two: Tensor, limit: float) -> bool:
    return torch.allclose(one, two, rtol=0.0, atol=limit, equal_nan=True)


def _largest(x: Tensor) -> float:
    if x.dtype == torch.bool or not x.numel():
        return 0.0
    return float(x.detach().abs().double().nan_to_num(0, 0, 0).max())


def _random(specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Random numbers; whole ones are zeros and ones."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(s.shape, generator=generator).to(s.dtype) * 0.5
        if s.dtype.is_floating_point
        else torch.randint(0, 2, s.shape, generator=generator).to(s.dtype)
        for s in specs
    ]


def _grouped(values: Sequence[Tensor], rows_of: Sequence[Rows | None], total: int) -> list[Tensor]:
    """The values with the whole numbers of samples zeros in one half of them and ones in the other:
    of numbers at random, small parts may hold all that the whole batch does.
    """
    found = []
    for value, rows in zip(values, rows_of, strict=True):
        if rows is not None and not value.is_floating_point():
            each = (torch.full_like(rows.take(value, k, 1), 2 * k >= total) for k in range(total))
            value = rows.join(list(each))
        found.append(value)
    return found


# ---------------------------------------------------------------------- what Python asks


class _Asked(TorchDispatchMode):
    """Notes the numbers of the samples' own values that Python's questions are about."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # What each tensor was made of: itself, or of a mask what it compares.
        self.made_of: dict[int, tuple[Tensor, ...]] = {id(x): (x,) for x in given}
        self.alive: list[Any] = list(given)
        self.asked: list[list[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        before = [x for t in tensors for x in self.made_of.get(id(t), ())]
        if str(func) == ASKS:
            self.asked.append([x.detach().clone() for x in before])
        out = func(*args, **(kwargs or {}))
        infinite = any(isinstance(x, float) and math.isinf(x) for x in leaves)
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and before and str(func) not in GUARDS and not infinite:
                self.alive.append(x)
                self.made_of[id(x)] = (x,) if x.is_floating_point() else tuple(before)
        return out


def _asks_of_several(trial: _Trial, values: _Values) -> bool:
    """Whether an answer depends on more than one sample: numbers that change with each of two."""

    def asked(given: Sequence[Tensor]) -> list[list[Tensor]]:
        with torch.no_grad():
            watch = _Asked([v for v, t in zip(given, values.trained, strict=True) if t])
            with watch:
                trial.run(given, 0)
        return watch.asked

    def moved(sample: int) -> list[Tensor]:
        found = []
        for value, rows, floating in zip(values.whole, values.rows_of, values.trained, strict=True):
            if floating and rows is not None:
                each = [rows.take(value, k, 1) for k in range(values.total)]
                each[sample] = each[sample] + NUDGE
                value = rows.join(each)
            found.append(value)
        return found

    plain = asked(values.whole)
    if not plain:
        return False
    changed = [
        [any(map(_unlike, a, b)) for a, b in zip(plain, asked(moved(k)), strict=False)]
        for k in (0, values.total - 1)
    ]
    return any(all(both) for both in zip(*changed, strict=False))


def _unlike(one: Tensor, two: Tensor) -> bool:
    return one.shape != two.shape or not torch.equal(one, two)

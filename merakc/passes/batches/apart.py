"""Whether what no rule can look into computes each sample by itself, seen with numbers.

Modules that run as they are and custom functions are run on random arguments, forward and backward,
on parts and on the whole batch. Numbers at random may all lie on one side of a bound; so what
depends on one sample is followed through the calls, and what Python asks of it on the way,
`if h.mean() > 0.5`, is answered otherwise, too (`merakc.passes.batches.dependence`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

from merakc.errors import failure
from merakc.frontend.opaque import ModuleCall
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Node, Ref, TensorSpec, map_refs
from merakc.kernels.opaque import OPAQUE, Call, autograd_reachable, drawing, find
from merakc.passes.batches.dependence import Dependence, otherwise
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
SOME_ASKED = 8  # of Python's questions, the first and the last, that are answered otherwise


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
                return _why_not(mine, other, values)
        except Exception as error:  # of the user's own code, given what it is not made for
            if not large:
                why = f"fails on random numbers ({failure(error)})"
    return why


def _why_not(mine: _Trial, other: _Trial, values: _Values) -> str:
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
    pairs = zip(mine.specs, other.specs, strict=True)
    of_samples = [one.shape != two.shape for one, two in pairs]
    apart = _same_gradients(mine, other, values) and not _of_others(other, values, of_samples)
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


# ---------------------------------------------------------------------- what depends on what


def _of_others(trial: _Trial, values: _Values, of_samples: Sequence[bool]) -> bool:
    """Whether the values and gradients of one sample depend on another's, in the calls that are
    made, or by what Python asks on the way and would do about another answer: of this sample, or of
    what is the same for all, as a buffer that says whether others are written.
    """
    for sample in (0, values.total - 1):
        plain = _Followed(trial, values, of_samples, sample)
        if plain.reaches_others():
            return True
        asked = list(enumerate(plain.watch.asked))
        for number, (answer, of_sample) in (*asked[:SOME_ASKED], *asked[SOME_ASKED:][-SOME_ASKED:]):
            for other in otherwise(answer):
                try:
                    found = _Followed(trial, values, of_samples, sample, {number: other})
                except Exception:  # as a check of the user's that finds something wrong
                    continue
                if not found.leaves_others(plain) if of_sample else found.reaches_others():
                    return True
    return False


class _Followed:
    """A call for all samples, forward and backward, with what depends on one of them marked."""

    def __init__(
        self, trial: _Trial, values: _Values, of_samples: Sequence[bool], sample: int,
        instead: Mapping[int, Any] | None = None,
    ) -> None:  # fmt: skip
        self.watch, self.sample, self.total = Dependence(instead), sample, values.total
        generator = torch.Generator().manual_seed(1)
        given = [v.clone() for v in values.whole]
        for value, rows in zip(given, values.rows_of, strict=True):
            if rows is not None:
                self.watch.mark(value, self._places(value, rows))
        with torch.enable_grad():
            own = [v.requires_grad_(t) for v, t in zip(given, values.trained, strict=True)]
            with self.watch:
                outs = trial.run(own, 0)
            self.outs = [
                (o, Rows(inner=len(o) // self.total) if of else None)
                for o, of in zip(outs, of_samples, strict=True)
            ]
            heads = [o for o in outs if o.requires_grad]
            leaves = [x for x in own if x.requires_grad]
            grads = [_numbers(TensorSpec(tuple(o.shape), o.dtype), generator) for o in heads]
            rows_of = [rows for o, rows in self.outs if o.requires_grad]
            for grad, rows in zip(grads, rows_of, strict=True):
                if rows is not None:
                    self.watch.mark(grad, self._places(grad, rows))
            found: Sequence[Tensor | None] = ()
            if heads and leaves:
                with self.watch:
                    found = torch.autograd.grad(heads, leaves, grads, allow_unused=True)
        every = dict(zip(map(id, leaves), found, strict=False))
        self.gradients = [
            (g, rows)
            for x, rows in zip(own, values.rows_of, strict=True)
            if rows is not None and (g := every.get(id(x))) is not None
        ]

    def reaches_others(self) -> bool:
        """Whether what is made of other samples, or of all of them, depends on this one."""
        marks = self.watch.marked
        return any(bool((marks(x) & ~own).any()) for x, own in self._results())

    def leaves_others(self, plain: _Followed) -> bool:
        """Whether all but this sample has what it has in another run."""
        pairs = zip(self._results(), plain._results(), strict=True)
        return all(
            x.shape == y.shape and _alike([x[~own]], [y[~own]]) for (x, own), (y, _) in pairs
        )

    def _results(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Values and gradients of samples, with the places of this one; buffers have none."""
        for value, rows in (*self.outs, *self.gradients):
            yield value.detach(), self._places(value, rows)

    def _places(self, value: Tensor, rows: Rows | None) -> Tensor:
        own = torch.zeros(value.numel(), dtype=torch.bool)
        if rows is not None:
            numbers = torch.arange(value.numel()).view(value.shape)
            own[rows.take(numbers, self.sample, 1).flatten()] = True
        return own.view(value.shape)

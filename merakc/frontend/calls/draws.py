"""Random calls, recorded as draws that are the same in every layout.

A random op of torch draws from a generator whose state depends on all that was drawn before. Here
each becomes arithmetic on `merakc::uniform` or `merakc::normal` (or is `merakc::dropout`), which
hash the seed of the step, the number of the call and the place of an element (`kernels/draws.py`).
The functions below run under the recorder: the torch calls that they make are recorded. An
in-place call becomes a copy into its target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from merakc.ir.graph import Input, InputKind, Node, Ref

Refuse = Callable[[str, str], Exception]
"""`refuse(what, remedy)` makes the error that names the user's line and module."""
Size = Sequence[int]

# Draws of integers are floor(u * range) of 53-bit numbers u.
MAX_RANGE = 2**53
OWN_GENERATOR = (
    "draw without generator=: the layouts of one seed could not share the state of a generator"
)
SEEDED = (
    "draw what is the same in every step once, in a buffer, or give it in the batch: numbers of a "
    "recorded forward do not come from torch's generator"
)
UNKNOWN = (
    "merakc draws uniform, normal, exponential, Bernoulli and integer numbers, permutations and "
    "multinomial samples: build it from these, or pass it in the batch"
)
RANDOM_FLOW = "the model's control flow depends on a random number"
NO_RANDOM_FLOW = (
    "one graph is compiled for all steps: set the probability that it is compared with (layerdrop) "
    "to 0, or multiply by a mask"
)
# Calls that hand on the numbers of a uniform draw.
HANDED_ON = frozenset(
    {"aten.expand.default", "aten.reshape.default", "aten.to.dtype", "aten.clone.default",
     "aten.detach.default", "aten.squeeze.default", "aten.unsqueeze.default"}
)  # fmt: skip
# What a comparison of a number between 0 and 1 says for bounds of at most 0, and of at least 1.
COMPARISONS: Mapping[str, tuple[bool, bool]] = {
    "aten.lt.Scalar": (False, True),
    "aten.le.Scalar": (False, True),
    "aten.gt.Scalar": (True, False),
    "aten.ge.Scalar": (True, False),
}
ASKED = frozenset({*COMPARISONS, "aten._local_scalar_dense.default"})


DROPOUTS = ("aten.dropout.default", "aten.dropout_.default")


@cache
def is_drawn(func: Any) -> bool:
    """Whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def drops_nothing(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call is of a dropout that is off."""
    return str(func) in DROPOUTS and (args[1] == 0.0 or not args[2])


class Draws:
    """The random calls of one recording, numbered in the order of the forward."""

    def __init__(self, refuse: Refuse, inputs: Sequence[Input], nodes: Sequence[Node]) -> None:
        self.refuse, self.inputs, self.nodes = refuse, inputs, nodes
        self.scalars: tuple[Tensor, ...] = ()  # the fake seed and number of the first sample
        self.number = 0
        self.single: set[str] = set()  # nodes of uniform draws of one number
        self.state = torch.default_generator.get_state()

    def prepare(self, scalar: Callable[[str], Tensor]) -> None:
        """Makes the scalar inputs that every draw reads, before the first."""
        if not self.scalars:
            self.scalars = scalar("seed"), scalar("first_sample")

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a random op returns. Raises what `refuse` makes where it cannot be drawn alike."""
        kwargs, name = dict(kwargs), str(func)
        if kwargs.pop("generator", None) is not None or any(
            isinstance(a, torch.Generator) for a in args
        ):
            raise self.refuse(f"random op {func} with a generator of its own", OWN_GENERATOR)
        if self._is_seeded():
            raise self.refuse(f"random op {func} of numbers that the forward seeds", SEEDED)
        out = kwargs.pop("out", None)
        _, packet, _ = name.split(".")
        dtype = kwargs.get("dtype")
        if name in OPS:
            found = OPS[name](self, *args)
        elif packet in SIZED:
            found = SIZED[packet](self, *args, dtype=dtype)
        elif packet.removesuffix("_") in FILLS:
            found = FILLS[packet.removesuffix("_")](self, args[0], *args[1:])
            out = args[0] if packet.endswith("_") else out
        else:
            raise self.refuse(f"random op {func}", UNKNOWN)
        return found if out is None else out.copy_(found)

    def _is_seeded(self) -> bool:
        """Whether the forward has set torch's generator, from which a recording draws nothing."""
        with _disable_current_modes():
            return not torch.equal(torch.default_generator.get_state(), self.state)

    def _block(self, numel: int) -> tuple[Any, ...]:
        """The keying as far as it is known here: samples are found by
        `passes/sharding/key_draws.py`.
        """
        self.number += 1
        return self.number, 0, (1, numel), (0, 0), (1, numel)

    def dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        """Zeroes with probability `p` and scales the rest."""
        if drops_nothing(torch.ops.aten.dropout.default, (x, p, train)):
            return x
        out: Tensor = torch.ops.merakc.dropout(x, *self.scalars, p, *self._block(x.numel()))
        return out

    def uniform(self, shape: Size, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers in [0, 1); one by itself is never 0, so that `rand(1) > 0` is so each time."""
        drawn = self._draw(torch.ops.merakc.uniform, shape, dtype)
        if math.prod(shape) == 1:
            drawn = drawn.clamp(min=torch.finfo(drawn.dtype).eps / 2)  # what is drawn next to 0
            self.single.add(self.nodes[-1].name)
        return drawn

    def normal(self, shape: Size, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers of mean 0 and variance 1."""
        return self._draw(torch.ops.merakc.normal, shape, dtype)

    def _draw(self, op: Any, shape: Size, dtype: torch.dtype | None) -> Tensor:
        dtype = dtype or torch.get_default_dtype()
        if not dtype.is_floating_point:
            raise self.refuse(f"random numbers of {dtype}", "draw real ones")
        out: Tensor = op(*self.scalars, *self._block(math.prod(shape)), list(shape), dtype)
        return out

    def answer(self, op: str, args: Sequence[Any]) -> bool | None:
        """What a comparison gives, if it is the same for every number that could be drawn.

        A layer is dropped if `torch.rand([]) < layerdrop`: never, where that is 0, nor where it is
        kept if `torch.rand(1) > dropped`. Raises what
        `refuse` makes where Python asks for a random number itself.
        """
        if not self.scalars or not isinstance(args[0], Ref):
            return None
        if op not in COMPARISONS:
            if self._is_drawn_alone(args[0]):
                raise self.refuse(RANDOM_FLOW, NO_RANDOM_FLOW)
            return None
        by_name = {n.name: n for n in self.nodes}
        node = by_name.get(args[0].node)
        while node is not None and node.op in HANDED_ON and node.name not in self.single:
            node = by_name.get(node.refs[0].node)
        if node is None or node.name not in self.single:
            return None
        bound, (below, above) = args[1], COMPARISONS[op]
        if bound <= 0:
            return below
        return above if bound >= 1 else None

    def _is_drawn_alone(self, ref: Ref) -> bool:
        """Whether a value comes from random draws, and from no parameter and no batch."""
        needed, drawn = {ref.node}, False
        for node in reversed(self.nodes):
            if node.name in needed:
                needed.update(r.node for r in node.refs)
                drawn |= node.op in ("merakc.uniform.default", "merakc.normal.default")
        allowed = (InputKind.SCALAR, InputKind.CONSTANT)
        return drawn and all(i.kind in allowed for i in self.inputs if i.name in needed)

    def integers(self, shape: Size, low: int | Tensor, high: int | Tensor) -> Tensor:
        """float64 whole numbers from `low` to `high` - 1."""
        span = high - low
        if isinstance(span, int) and not 0 < span <= MAX_RANGE:
            raise self.refuse(f"random integers from {low} to {high}", "ask for 1 to 2**53 of them")
        return (self.uniform(shape, torch.float64) * span).floor() + low


def _real(like: Tensor) -> torch.dtype:
    """The dtype that random numbers for `like` are computed in."""
    return like.dtype if like.dtype.is_floating_point else torch.get_default_dtype()


# What is like a tensor: functions of its shape and dtype, for `x.uniform_()` and others.


def _uniform(draws: Draws, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    drawn = draws.uniform(like.shape, _real(like))
    return drawn if (low, high) == (0.0, 1.0) else drawn * (high - low) + low


def _normal(draws: Draws, like: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    drawn = draws.normal(like.shape, _real(like))
    return drawn if (mean, std) == (0.0, 1.0) else drawn * std + mean


def _bernoulli(draws: Draws, like: Tensor, p: float | Tensor = 0.5) -> Tensor:
    dtype = _real(p if isinstance(p, Tensor) else like)
    return (draws.uniform(like.shape, dtype) < p).to(like.dtype)


def _exponential(draws: Draws, like: Tensor, rate: float = 1.0) -> Tensor:
    # Never 0, of which callers take the logarithm.
    drawn = draws.uniform(like.shape, torch.float64).clamp(min=2.0**-54)
    return (-torch.log1p(-drawn) / rate).to(like.dtype)


def _geometric(draws: Draws, like: Tensor, p: float) -> Tensor:
    drawn = draws.uniform(like.shape, torch.float64)
    return (torch.log1p(-drawn) / math.log1p(-p)).floor().add(1).to(like.dtype)


def _cauchy(draws: Draws, like: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    drawn = draws.uniform(like.shape, torch.float64)
    return (torch.tan((drawn - 0.5) * math.pi) * sigma + median).to(like.dtype)


def _random(draws: Draws, like: Tensor, low: int, high: int | None = None) -> Tensor:
    """`random_(high)` and `random_(low, high)`."""
    low, high = (0, low) if high is None else (low, high)
    return draws.integers(like.shape, low, high).to(like.dtype)


FILLS: Mapping[str, Callable[..., Tensor]] = {
    "bernoulli": _bernoulli,
    "cauchy": _cauchy,
    "exponential": _exponential,
    "geometric": _geometric,
    "log_normal": lambda draws, like, mean=1.0, std=2.0: _normal(draws, like, mean, std).exp(),
    "normal": _normal,
    "normal_functional": _normal,
    "random": _random,
    "uniform": _uniform,
}


# What is made from a size, or from a tensor of the wanted shape.


def _randint(draws: Draws, *args: Any, dtype: torch.dtype | None) -> Tensor:
    """`randint(high, size)` and `randint(low, high, size)`."""
    *bounds, size = args
    low, high = (0, *bounds)[-2:]
    return draws.integers(size, low, high).to(dtype or torch.int64)


def _randint_like(draws: Draws, like: Tensor, *bounds: Any, dtype: torch.dtype | None) -> Tensor:
    low, high = (0, *bounds)[-2:]
    return draws.integers(like.shape, low, high).to(dtype or like.dtype)


SIZED: Mapping[str, Callable[..., Tensor]] = {
    "rand": lambda draws, size, *, dtype: draws.uniform(size, dtype),
    "rand_like": lambda draws, like, *, dtype: draws.uniform(like.shape, dtype or like.dtype),
    "randint": _randint,
    "randint_like": _randint_like,
    "randn": lambda draws, size, *, dtype: draws.normal(size, dtype),
    "randn_like": lambda draws, like, *, dtype: draws.normal(like.shape, dtype or like.dtype),
    "randperm": lambda draws, n, *, dtype: (
        draws.uniform((n,), torch.float64).argsort().to(dtype or torch.int64)
    ),
}


# Ops with a meaning of their own.


def _normal_about(draws: Draws, mean: Any, std: Any = 1.0) -> Tensor:
    """`torch.normal` where the mean, the standard deviation or both are tensors."""
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = (tensors[0] + tensors[-1]).shape
    found: Tensor = draws.normal(shape, tensors[0].dtype) * std + mean
    return found


def _native_dropout(draws: Draws, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = draws.uniform(x.shape, _real(x)) >= p
    return x * kept * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept


def _rrelu(
    draws: Draws, x: Tensor, noise: Tensor, low: float, high: float, training: bool = False
) -> Tensor:
    """Randomised leaky ReLU (arXiv 1505.00853): negative numbers times a slope of their own."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (low + high) / 2)
    slopes = draws.uniform(x.shape, x.dtype) * (high - low) + low
    return torch.where(x <= 0, x * slopes, x)


def _multinomial(draws: Draws, p: Tensor, number: int, replacement: bool = False) -> Tensor:
    """Indices `[..., number]` drawn with probabilities `p`, `[..., n]`.

    Without replacement by a race of exponential clocks (Efraimidis and Spirakis, 2006), with it
    by looking up the cumulated probabilities.
    """
    p = p.detach().double()
    if not replacement or number == 1:
        return (p / _exponential(draws, p)).topk(number, -1).indices
    ends = p.cumsum(-1)
    places = draws.uniform((*p.shape[:-1], number), torch.float64)
    return torch.searchsorted(ends / ends[..., -1:], places, right=True)


OPS: Mapping[str, Callable[..., Any]] = {
    "aten.dropout.default": Draws.dropout,
    "aten.dropout_.default": lambda draws, x, *args: x.copy_(draws.dropout(x, *args)),
    "aten.bernoulli.default": lambda draws, p: _bernoulli(draws, p, p),
    "aten.normal.Tensor_float": _normal_about,
    "aten.normal.float_Tensor": _normal_about,
    "aten.normal.Tensor_Tensor": _normal_about,
    "aten.normal.float_float": lambda draws, mean, std, size: draws.normal(size) * std + mean,
    "aten.native_dropout.default": _native_dropout,
    "aten.rrelu_with_noise.default": _rrelu,
    "aten.rrelu_with_noise_.default": lambda draws, x, *args: x.copy_(_rrelu(draws, x, *args)),
    "aten.multinomial.default": _multinomial,
}

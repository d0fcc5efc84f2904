"""Gradients of which a rank holds parts, or some: numbers that are made of them are the whole's.

`torch.nn.utils.clip_grad_norm_`, `p.grad.norm()` and sums that people write themselves are right on
every plan. A number of one gradient is communicated when it is read; those of many that become one
norm are communicated once. What would take a part for the whole is an error. Optimizers see plain
tensors: nothing here stands in the way of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _foreach_utils

from merakc.errors import ConfigError
from merakc.runtime.part import place_of
from merakc.train.parameters.norms import NOTHING, Owners
from merakc.train.parameters.numbers import (
    NORMS,
    REDUCTIONS,
    Kind,
    Source,
    Term,
    kind_of,
    total,
    values_of,
)

# Calls whose result has the elements of their argument, in other memory or of another dtype.
_COPIES = {
    "clone", "to", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "type",
    "type_as", "reshape", "flatten", "ravel", "pin_memory",
}  # fmt: skip
_WRITES = {"zero_", "fill_", "copy_", "requires_grad_", "normal_", "uniform_", "detach_"}
# What stays one rank's share of a number, or becomes several's.
_CARRIES_SHARES = {"to", "clone", "detach", "stack", "float", "double", "cpu", "cuda", "view"}
# Python's names of pointwise calls that are not those of torch's ops.
_PYTHON = {"truediv": "div", "floordiv": "floor_divide", "and": "bitwise_and", "or": "bitwise_or"}


class Gradient(torch.Tensor):
    """A rank's gradient of a parameter, or what was computed of it element by element."""

    source: Source

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """See the module's text."""
        with torch._C.DisableTorchFunctionSubclass():
            return _called(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Share(torch.Tensor):
    """One rank's shares of numbers: a scalar of one, or a row of several. What reads their values
    communicates, so that every rank must read them.
    """

    terms: tuple[Term, ...]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """See the module's text."""
        with torch._C.DisableTorchFunctionSubclass():
            return _called(func, args, kwargs or {})


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, as what this rank holds."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def follow(parameters: Mapping[str, torch.Tensor], owners: Owners) -> None:
    """Lets the gradients of parameters say what they are of, from when they are accumulated."""
    if Gradient not in _foreach_utils._foreach_supported_types:
        _foreach_utils._foreach_supported_types.append(Gradient)
    _watch_optimizers()
    for name, parameter in parameters.items():
        layout = owners.placements[name].layout
        is_part = place_of(parameter) is not None
        source = Source(name, owners, layout.numel, is_part)
        parameter.register_post_accumulate_grad_hook(_Tell(source))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class _Tell:
    source: Source

    def __call__(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and type(parameter.grad) is not Gradient:
            parameter.grad = _of(self.source, parameter.grad)

    def __deepcopy__(self, _: object) -> _Tell:
        return self


def _of(source: Source, tensor: torch.Tensor) -> Gradient:
    made = tensor.as_subclass(Gradient)
    made.source = source
    return made


# ---------------------------------------------------------------------- optimizers


class _State:
    """The frame of the optimizer's step that runs, if one does."""

    frame: FrameType | None = None

    @property
    def is_stepping(self) -> bool:
        """Whether it does; a step that ended in an error has left its frame here."""
        if self.frame is None:
            return False
        try:
            self.frame.clear()
        except RuntimeError:  # it is executing
            return True
        self.frame = None
        return False


_state = _State()


@cache
def _watch_optimizers() -> None:
    """Within an optimizer's step gradients are plain tensors: whether it may update what a rank
    holds is tried before. Within its closure, which computes and clips them, they are gradients.
    """

    def before(_: Any, args: Any, kwargs: Any) -> Any:
        if _state.is_stepping:
            return None
        _state.frame = sys._getframe(1)
        optimizer, *given = args
        named = {name: _outside(value) for name, value in kwargs.items()}
        return (optimizer, *map(_outside, given)), named

    def after(*_: Any) -> None:
        if _state.frame is sys._getframe(1):
            _state.frame = None

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _outside(closure: Any) -> Any:
    """What an optimizer calls in its step, as if none ran."""
    if not callable(closure):
        return closure

    @wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:
        frame, _state.frame = _state.frame, None
        try:
            return closure(*args, **kwargs)
        finally:
            _state.frame = frame

    return run


# ---------------------------------------------------------------------- calls


def _called(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call of torch's with gradients or shares among its arguments."""
    if _state.is_stepping:
        return func(*args, **kwargs)
    name = func.__name__
    leaves = pytree.tree_leaves((args, kwargs))
    shares = [x for x in leaves if isinstance(x, Share)]
    if shares:
        found = _of_shares(func, name, args, kwargs, shares)
        if found is not None:
            return found
        args, kwargs = pytree.tree_map_only(Share, _value, (tuple(args), kwargs))
    gradients = [x for x in leaves if isinstance(x, Gradient)]
    if not gradients:
        return func(*args, **kwargs)
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return _of_lists(func, name, args, kwargs, gradients)
    first = gradients[0]
    if name in NORMS | REDUCTIONS and args and args[0] is first and not _is_pair(args):
        kind = kind_of(name, first, first.source.numel, args[1:], kwargs)
        if kind is not None:
            return _shared(first, *kind)
        if first.source.is_part:
            raise _refusal(name, first)
    return _by_elements(func, name, args, kwargs, gradients)


def _by_elements(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], gradients: list[Gradient]
) -> Any:
    """A call that keeps elements where they are, or one on whole gradients."""
    first = gradients[0]
    alike = all(g.source is first.source for g in gradients)
    if name.endswith("_") and not name.startswith("__"):
        keeps = (_is_pointwise(name) and alike) or name in _WRITES
        if first.source.is_part and not keeps:
            raise _refusal(name, first)
        return func(*args, **kwargs)
    result = func(*args, **kwargs)
    if not isinstance(result, torch.Tensor):
        several = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result))
        if several and first.source.is_part:  # topk, sort, split, std_mean, ...
            raise _refusal(name, first)
        return result
    same = result.numel() == first.numel()
    if alike and same and (_is_pointwise(name) or name in _COPIES or _is_view(result, first)):
        return _of(first.source, result)
    if first.source.is_part:
        raise _refusal(name, first)
    return _of(first.source, result) if same else result


def _is_view(result: torch.Tensor, of: torch.Tensor) -> bool:
    return result.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()


def _is_pair(args: Sequence[Any]) -> bool:
    """Whether `max` and the like are of two tensors, element by element."""
    return len(args) > 1 and isinstance(args[1], torch.Tensor)


@cache
def _is_pointwise(name: str) -> bool:
    """Whether torch says of an op of this name that it computes element by element."""
    name = name.strip("_") if name.startswith("__") else name
    for known in (name, name[1:] if name[:1] in "ri" else name):
        packet = getattr(torch.ops.aten, _PYTHON.get(known, known), None)
        if packet is not None and hasattr(packet, "overloads"):
            first = getattr(packet, packet.overloads()[0])
            if torch.Tag.pointwise in first.tags:
                return True
    return False


def _of_lists(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], gradients: list[Gradient]
) -> Any:
    """A call on lists of tensors: element by element, but for norms and the search for infinity."""
    if name == "_foreach_norm":
        order = kwargs.get("ord", args[1] if len(args) > 1 else 2)
        found = []
        for tensor in args[0]:
            if isinstance(tensor, Gradient):
                kind = kind_of("norm", tensor, tensor.source.numel, (order,), {})
                assert kind is not None
                found.append(_shared(tensor, *kind))
            else:
                found.append(torch.linalg.vector_norm(tensor, order))
        return found
    if name == "_foreach_max":
        raise _refusal(name, gradients[0])
    result = func(*args, **kwargs)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        found_inf, owners = args[1], gradients[0].source.owners
        every = owners.total(dict.fromkeys(owners.place, found_inf), "max")
        found_inf.copy_(every.clamp(min=0.0))
    if isinstance(result, (tuple, list)) and len(result) == len(args[0]):
        pairs = zip(result, args[0], strict=True)
        return [_of(g.source, r) if isinstance(g, Gradient) else r for r, g in pairs]
    return result


def _refusal(name: str, gradient: Gradient) -> ConfigError:
    source = gradient.source
    return ConfigError(
        f"torch.{name.strip('_')} is called on the gradient of '{source.name}', of which this rank "
        f"holds {gradient.numel()} of {source.numel} elements: it would take them for all. Norms, "
        "sums, means, largest and smallest elements are those of the whole, and what is computed "
        "element by element is right; model.full_gradients() gives whole gradients on rank 0, "
        "p.grad.as_subclass(torch.Tensor) this rank's elements"
    )


# ---------------------------------------------------------------------- numbers


def _shared(
    gradient: Gradient, kind: Kind, number: Callable[[torch.Tensor], torch.Tensor]
) -> Share:
    """This rank's share of a number of a gradient."""
    values = plain(gradient)
    if values.numel():
        result = number(values)
        dtype, own = result.dtype, result.double()
    else:  # of another rank's parameter, or an empty part
        dtype, own = number(values.new_ones(1)).dtype, values.new_full((), NOTHING[kind.combine])
    if kind.root != 1.0 or kind.divisor > 1:
        dtype = values.dtype
    return _share((Term(gradient.source, own.double(), kind, dtype),), ())


def _share(terms: tuple[Term, ...], shape: tuple[int, ...]) -> Share:
    first = terms[0]
    made = torch.zeros(shape, dtype=first.dtype, device=first.own.device).as_subclass(Share)
    made.terms = terms
    return made


def _of_shares(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], shares: Sequence[Share]
) -> Any:
    """What shares become that need no values yet, or one norm of many; None for other calls."""
    if name == "stack" and len(shares) == len(args[0]) and not any(s.dim() for s in shares):
        return _share(tuple(t for s in shares for t in s.terms), (len(shares),))
    first = shares[0]
    if name in _CARRIES_SHARES - {"stack"} and args[0] is first and len(shares) == 1:
        result = func(*args, **kwargs)
        if result.shape == first.shape:
            terms = (Term(t.source, t.own.to(result.device), t.kind, result.dtype)
                     for t in first.terms)  # fmt: skip
            return _share(tuple(terms), tuple(first.shape))
    if name in NORMS and args[0] is first and first.dim() == 1:
        kind = kind_of(name, first, 1, args[1:], kwargs)
        if kind is not None and all(t.kind == kind[0] for t in first.terms):
            return total(first.terms, kind[0])
    return None


def _value(share: Share) -> torch.Tensor:
    """The numbers of the whole, of which these are the shares."""
    return torch.stack(values_of(share.terms)).view(share.shape)

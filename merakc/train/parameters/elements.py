"""Parameters and gradients of which a rank holds parts, or some: they speak for the whole.

`p.numel()` and `p.shape`, `torch.nn.utils.clip_grad_norm_`, `p.grad.norm()`, `p.norm()` and sums
that people write themselves are right on every plan. A number of one tensor is communicated when it
is read; those of many that become one norm are communicated once. What would take a part for the
whole is an error. Optimizers see plain tensors: nothing here stands in the way of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils import _foreach_utils

from merakc.errors import ConfigError
from merakc.runtime.part import place_of, plain
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
from merakc.train.parameters.places import elsewhere
from merakc.train.parameters.stepping import is_stepping, watch_optimizers

# Calls whose result has the elements of their argument, in other memory or of another dtype.
_COPIES = {
    "clone", "to", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "type",
    "type_as", "reshape", "flatten", "ravel", "pin_memory", "zeros_like", "ones_like", "empty_like",
    "full_like",
}  # fmt: skip
_WRITES = {"zero_", "fill_", "copy_", "requires_grad_", "detach_", "constant_"}
# What is asked about a tensor and not of its elements: of the whole, and of any tensor.
_SIZES = {"shape", "size", "__len__", "nbytes"}
_OF_ANY = {
    "device", "dtype", "layout", "dim", "ndim", "ndimension", "element_size", "itemsize", "type",
    "requires_grad", "grad_fn", "data_ptr", "storage", "untyped_storage", "storage_offset",
    "stride", "get_device", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "retains_grad", "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
    "names", "__repr__", "__format__", "__hash__", "__reduce_ex__",
    "_has_compatible_shallow_copy_type",
}  # fmt: skip
_ACCESS = ("__get__", "__set__", "__delete__")
_EQUAL = {"equal": torch.eq, "allclose": torch.isclose}
# What differentiates, and gives gradients that say themselves what they are of; what users ask for
# this rank's elements by; and what takes no more than a dtype and a device of a tensor.
_AS_THEY_ARE = (
    torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward, torch.Tensor.as_subclass,
    torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full,
    torch.Tensor.new_tensor,
)  # fmt: skip
# What stays one rank's share of a number, or becomes several's.
_CARRIES_SHARES = {"to", "clone", "detach", "stack", "float", "double", "cpu", "cuda", "view"}
# Python's names of pointwise calls that are not those of torch's ops.
_PYTHON = {"truediv": "div", "floordiv": "floor_divide", "and": "bitwise_and", "or": "bitwise_or"}


class Elements(torch.Tensor):
    """What a rank has of a parameter's values or gradient, or of what was computed of it element by
    element.
    """

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


class HeldParameter(nn.Parameter):
    """A parameter, of which this rank has a part, all or nothing."""

    source: Source
    __torch_function__ = Elements.__torch_function__


Known = (Elements, HeldParameter)


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


def follow(parameters: Mapping[str, torch.Tensor], owners: Owners) -> None:
    """Lets parameters say what they are, and their gradients from when they are accumulated."""
    if Elements not in _foreach_utils._foreach_supported_types:
        _foreach_utils._foreach_supported_types += [*Known]  # type: ignore[list-item]
    watch_optimizers()
    for name, parameter in parameters.items():
        whole = owners.placements[name].layout.shape
        is_part = place_of(parameter) is not None or parameter in elsewhere
        source = Source(name, owners, tuple(whole), tuple(parameter.shape), is_part)
        if parameter.requires_grad:
            parameter.register_hook(partial(_known, source))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(_Tell(source))  # type: ignore[no-untyped-call]
        parameter.__class__ = HeldParameter
        parameter.source = source  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class _Tell:
    source: Source

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and type(gradient) is not Elements:
            parameter.grad = _of(self.source, gradient)

    def __deepcopy__(self, _: object) -> _Tell:
        return self


def _of(source: Source, tensor: torch.Tensor) -> Elements:
    made = tensor.as_subclass(Elements)
    made.source = source
    return made


def _known(source: Source, gradient: torch.Tensor | None) -> Elements | None:
    """A hook's gradient: none of a step that was skipped, or where the loss does not see it."""
    return None if gradient is None else _of(source, gradient)


# ---------------------------------------------------------------------- calls


def _called(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call of torch's with elements or shares among its arguments."""
    if is_stepping() or func in _AS_THEY_ARE:
        return func(*args, **kwargs)
    name = func.__name__
    leaves = pytree.tree_leaves((args, kwargs))
    shares = [x for x in leaves if isinstance(x, Share)]
    if shares:
        found = _of_shares(func, name, args, kwargs, shares)
        if found is not None:
            return found
        args, kwargs = pytree.tree_map_only(Share, _value, (tuple(args), kwargs))
    known = [x for x in leaves if isinstance(x, Known)]
    if not known:
        return func(*args, **kwargs)
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return _of_lists(func, name, args, kwargs, known)
    if name in _ACCESS:
        return _accessed(func, name, args)
    first = known[0]
    if name == "__deepcopy__":
        made = args[1][id(first)] = _of(first.source, plain(first).detach().clone())
        return made.requires_grad_(first.requires_grad and first.is_leaf)
    if name in _EQUAL and all(x.source is first.source for x in known):
        alike = _by_elements(_EQUAL[name], name, args, kwargs, known)
        return bool(_value(_shared(alike, *_kind("all", alike, (), {}))))
    if name in NORMS | REDUCTIONS and args and args[0] is first and not _is_pair(args):
        kind = _kind(name, first, args[1:], kwargs)
        if kind is not None:
            return _shared(first, *kind)
        if first.source.is_part:
            raise _refusal(name, first)
    return _by_elements(func, name, args, kwargs, known)


def _kind(name: str, of: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return kind_of(name, of, of.source.numel, rest, kwargs)


def _accessed(func: Any, access: str, args: Sequence[Any]) -> Any:
    """An attribute that is read or set."""
    name, of = func.__self__.__name__, args[0]
    if access != "__get__":
        if name == "grad" and type(args[-1]) is torch.Tensor:
            args = of, _of(of.source, args[1])
        return func(*args)
    if name == "grad":
        return func(*args)
    return _by_elements(func, name, args, {}, [of])


def _by_elements(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], known: list[Any]
) -> Any:
    """A call that keeps elements where they are, or one on whole tensors."""
    first = next((x for x in known if x.source.is_part), known[0])
    is_part, alike = first.source.is_part, all(x.source is first.source for x in known)
    if is_part and not _fits(first, args, kwargs):
        raise _refusal(name, first)
    pointwise = _is_pointwise(name)
    if name.endswith("_") and not name.startswith("__"):
        if is_part and not (alike and (pointwise or name in _WRITES)):
            raise _refusal(name, first)
        return func(*args, **kwargs)
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if is_part:
            raise _refusal(name, first) from error
        raise
    if not isinstance(result, torch.Tensor):
        return _answer(func, name, args, kwargs, first, result) if is_part else result
    same = result.numel() == first.numel()
    keeps = pointwise or name in _COPIES or name in _EQUAL or _is_view(name, result, first)
    if is_part and not (alike and same and keeps):
        raise _refusal(name, first)
    return _of(first.source, result) if same and alike else result


def _fits(first: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether other tensors of a call are numbers, or of just the elements that the rank holds:
    others would meet other elements than they would of the whole.
    """
    return all(
        isinstance(x, Known) or x.numel() == 1 or x.shape == first.shape
        for x in pytree.tree_leaves((args, kwargs))
        if isinstance(x, torch.Tensor)
    )


def _answer(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], of: Any, result: Any
) -> Any:
    """What is no tensor, of a part: the whole's, or what is the same of any tensor."""
    if name in ("numel", "nelement"):
        return of.source.numel
    if name in _SIZES and tuple(of.shape) == of.source.held:
        whole = torch.empty(of.source.shape, dtype=of.dtype, device="meta")
        return func(whole, *args[1:], **kwargs)
    several = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result))
    if not several and (name in _OF_ANY or (name.startswith("is_") and name != "is_nonzero")):
        return result
    raise _refusal(name, of)


def _is_view(name: str, result: torch.Tensor, of: torch.Tensor) -> bool:
    if of.numel():
        return result.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
    packet: Any = getattr(torch.ops.aten, name, None)
    first = getattr(packet, packet.overloads()[0]) if hasattr(packet, "overloads") else None
    return name in ("data", "T", "mT") or (first is not None and first.is_view)


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
                return torch.Tag.nondeterministic_seeded not in first.tags
    return False


def _of_lists(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], known: list[Any]
) -> Any:
    """A call on lists of tensors: element by element, but for norms and the search for infinity."""
    if name == "_foreach_norm":
        order = kwargs.get("ord", args[1] if len(args) > 1 else 2)
        found = []
        for tensor in args[0]:
            if isinstance(tensor, Known):
                kind = _kind("norm", tensor, (order,), {})
                assert kind is not None
                found.append(_shared(tensor, *kind))
            else:
                found.append(torch.linalg.vector_norm(tensor, order))
        return found
    if name == "_foreach_max":
        raise _refusal(name, known[0])
    result = func(*args, **kwargs)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        found_inf, owners = args[1], known[0].source.owners
        every = owners.total(dict.fromkeys(owners.place, found_inf), "max")
        found_inf.copy_(every.clamp(min=0.0))
    if isinstance(result, (tuple, list)) and len(result) == len(args[0]):
        pairs = zip(result, args[0], strict=True)
        return [_of(g.source, r) if isinstance(g, Known) else r for r, g in pairs]
    return result


def _refusal(name: str, of: Any) -> ConfigError:
    source = of.source
    return ConfigError(
        f"torch.{name.strip('_')} is called on '{source.name}' or its gradient, of which this rank "
        f"holds {of.numel()} of {source.numel} elements: it would take them for all. Norms, sums, "
        "means, largest and smallest elements are those of the whole, and what is computed element "
        "by element is right; model.full_state_dict() and model.full_gradients() give whole "
        "tensors on rank 0, .detach().as_subclass(torch.Tensor) this rank's elements"
    )


# ---------------------------------------------------------------------- numbers


def _shared(of: Any, kind: Kind, number: Callable[[torch.Tensor], torch.Tensor]) -> Share:
    """This rank's share of a number of a parameter or a gradient."""
    values = plain(of)
    if values.numel():
        result = number(values)
        dtype, own = result.dtype, result.double()
    else:  # of another rank's parameter, or an empty part
        dtype, own = number(values.new_ones(1)).dtype, values.new_full((), NOTHING[kind.combine])
    if kind.root != 1.0 or kind.divisor > 1:
        dtype = values.dtype
    return _share((Term(of.source, own.double(), kind, dtype),), ())


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

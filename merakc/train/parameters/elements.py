"""Parameters and gradients of which a rank holds parts, or some: they speak for the whole.

`p.numel()` and `p.shape`, `torch.nn.utils.clip_grad_norm_`, `p.grad.norm()`, `p.norm()` and sums
that people write themselves are right on every plan. A number of one tensor is communicated when it
is read; those of many that become one norm are communicated once. What is not known to be right for
parts is an error. Optimizers see plain tensors: nothing here stands in the way of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils

from merakc.runtime.groups import Groups
from merakc.runtime.part import OfAWhole, TensorPart, place_of, places, plain
from merakc.runtime.state import Placement
from merakc.train.parameters.memory import note_whole
from merakc.train.parameters.norms import Owners
from merakc.train.parameters.numbers import (
    COPIES,
    NORMS,
    REDUCTIONS,
    Source,
    is_pointwise,
    kind_of,
    spreads,
)  # fmt: skip
from merakc.train.parameters.places import absent, elsewhere
from merakc.train.parameters.shares import (
    MEETS,
    Share,
    called,
    lets_none_through,
    meets_gradients,
    number_of,
    refusal,
    share_of,
)
from merakc.train.parameters.stepping import is_stepping, watch_optimizers

# Those that have all elements, in another shape, and in which order they take them.
_FLAT = {"flatten", "ravel"}
_VIEWS = _FLAT | {
    "view", "reshape", "view_as", "reshape_as", "_unsafe_view", "_reshape_alias", "unflatten",
    "squeeze", "unsqueeze", "T", "mT", "H", "mH", "adjoint", "t", "transpose", "swapaxes",
    "swapdims", "permute", "movedim", "moveaxis",
}  # fmt: skip
_WRITES = {"zero_", "fill_", "copy_", "requires_grad_", "detach_", "constant_"}
# What is asked about a tensor and not of its elements: of the whole, and of any tensor.
_SIZES = {"shape", "size", "__len__", "nbytes"}
_OF_ANY = {
    "device", "dtype", "layout", "dim", "ndim", "ndimension", "element_size", "itemsize", "type",
    "requires_grad", "grad_fn", "data_ptr", "storage", "untyped_storage", "storage_offset",
    "stride", "get_device", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "retains_grad", "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
    "names", "__format__", "__hash__", "_has_compatible_shallow_copy_type",
}  # fmt: skip
_NUMBER = {"item", "tolist", "__float__", "__int__", "__bool__", "is_nonzero"}  # of one element
_OF_ELEMENTS = {"is_nonzero", "is_same_size"}
_OFTEN = {
    torch.Tensor.grad.__get__, torch.Tensor.grad.__set__, torch.Tensor.requires_grad.__get__,  # type: ignore[union-attr, attr-defined]
    torch.Tensor.__eq__, torch.Tensor.__ne__,  # with None
}  # fmt: skip
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_ACCESS = ("__get__", "__set__", "__delete__")
_EQUAL = {"equal": torch.eq, "allclose": torch.isclose}
# What differentiates, and gives gradients that say themselves what they are of; what users ask for
# this rank's elements by; and what takes no more than a dtype and a device of a tensor.
_AS_THEY_ARE = (
    torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward, torch.Tensor.as_subclass,
)  # fmt: skip
_FUSED = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
_NEW = {"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"}
_PYTHON_WRITES = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


class Elements(OfAWhole, torch.Tensor):
    """What a rank has of a parameter's values or gradient, or of what was computed of it element by
    element; `views` are the calls that have changed their shape or order since.
    """

    source: Source
    views: tuple[str, ...] = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """See the module's text."""
        is_plain = func in _OFTEN and type(args[0]) in Known and (len(args) < 2 or args[1] is None)
        if is_plain or is_stepping():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs) if kwargs else func(*args)
        if any(isinstance(x, Share) for x in pytree.tree_leaves((args, kwargs))):
            return called(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return _called(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of a part, as a state dict has it, which says so."""
        return _told_apart(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        own = repr(plain(self).detach())
        if not self.source.is_part:
            return own
        held, name = plain(self).numel(), self.source.name
        return f"{own}\n({held} of {self.source.numel} elements of '{name}')"


class HeldParameter(OfAWhole, nn.Parameter):
    """A parameter, of which this rank has a part, all or nothing."""

    source: Source
    views: tuple[str, ...] = ()
    __torch_function__ = Elements.__torch_function__
    __reduce_ex__ = Elements.__reduce_ex__
    __repr__ = Elements.__repr__  # type: ignore[assignment]


Known = (Elements, HeldParameter)


def follow(parameters: Mapping[str, torch.Tensor], owners: Owners) -> None:
    """Lets parameters say what they are, and their gradients from when they are accumulated."""
    if Elements not in _foreach_utils._foreach_supported_types:
        _foreach_utils._foreach_supported_types += [*Known]  # type: ignore[list-item]
    watch_optimizers()
    for name, parameter in parameters.items():
        whole = owners.placements[name].layout.shape
        place = place_of(parameter)
        is_part = place is not None or parameter in elsewhere
        source = Source(name, owners, tuple(whole), tuple(parameter.shape), is_part, place)
        if parameter.requires_grad:
            parameter.register_hook(partial(_known, source))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(_tell)  # type: ignore[no-untyped-call]
        parameter.__class__ = HeldParameter
        parameter.source = source  # type: ignore[attr-defined]


def told_buffers(
    state: Mapping[str, torch.Tensor], placements: Mapping[str, Placement], groups: Groups
) -> dict[str, Elements]:
    """The buffers of which ranks have parts, or some, in the same memory, as what says so."""
    every = {n: replace(p, is_parameter=True) for n, p in placements.items() if not p.is_parameter}
    owners = Owners(every, groups, None, groups.device)
    found = {}
    for name, where in every.items():
        own, shape = state.get(name), tuple(where.layout.shape)
        place = None if own is None else place_of(own)
        if place is None and groups.mesh.pp == 1:
            continue
        tensor = absent(where, groups.device) if own is None else own.detach()
        is_part = own is None or place is not None
        source = Source(name, owners, shape, tuple(tensor.shape), is_part, place)
        found[name] = made = _of(source, tensor)
        if is_part:
            kept = elsewhere if own is None else places
            kept[made] = shape if own is None else place
    return found


@torch.enable_grad()  # or users could write to it under `no_grad` alone
def _tell(parameter: HeldParameter) -> None:
    """A hook that refers to no parameter: Python does not collect what such a hook keeps."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = parameter.grad
        if type(gradient) is torch.Tensor:
            parameter.grad = _of(parameter.source, gradient)


def _of(source: Source, tensor: torch.Tensor, views: tuple[str, ...] = ()) -> Elements:
    made = tensor.as_subclass(Elements)
    made.source, made.views = source, views
    return made


def _known(source: Source, gradient: torch.Tensor | None) -> Elements | None:
    """A hook's gradient: none of a step that was skipped, or where the loss does not see it."""
    return None if gradient is None else _of(source, gradient)


def tell_state(of: HeldParameter, state: dict[str, Any]) -> None:
    """Lets an optimizer's state of a parameter that has its elements say what it is, too."""
    for key, value in state.items():
        if type(value) is torch.Tensor and value.dim() and value.shape == plain(of).shape:
            with torch.no_grad():
                state[key] = _of(of.source, value)


def _told_apart(of: Any) -> torch.Tensor:
    """What stands for elements outside this process."""
    source, own = of.source, plain(of)
    if not source.is_part:
        return nn.Parameter(own.detach(), of.requires_grad) if isinstance(of, nn.Parameter) else own
    if source.place is None or of.views:
        raise refusal("pickle", of)
    return TensorPart(own.detach(), source.place)


def _called(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call of torch's with elements among its arguments."""
    if func in _AS_THEY_ARE:
        return func(*args, **kwargs)
    if func == _DATA:  # so that what is written there is noticed
        func = torch.Tensor.detach
    packet = getattr(func, "overloadpacket", func)  # an op of a mode's, below
    name = func.__self__.__name__ if func.__name__ in _ACCESS else packet.__name__
    known = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Known)]
    if name in _NEW and len(known) == 1 and known[0] is args[0]:
        return func(*args, **kwargs)
    if name.startswith(("_foreach_", "_amp_foreach_")) or name in _FUSED:
        return _of_lists(func, name, args, kwargs)
    if func.__name__ in _ACCESS and (func.__name__ != "__get__" or name == "grad"):
        return _accessed(func, name, args)
    first = known[0]
    if name == "__deepcopy__":
        made = args[1][id(first)] = _of(first.source, plain(first).detach().clone(), first.views)
        return made.requires_grad_(first.requires_grad and first.is_leaf)
    if name in _EQUAL and len(known) > 1 and all(x.source.is_like(first.source) for x in known):
        same = _by_elements(_EQUAL[name], "eq", args, kwargs, known)
        return bool(share_of(same, _kind("all", same, (), {})))
    is_pair = len(args) > 1 and isinstance(args[1], torch.Tensor)  # `max` and the like, of two
    if name in NORMS | REDUCTIONS and args and args[0] is first and not is_pair:
        kind = _kind(name, first, args[1:], kwargs)
        if kind is not None:
            return share_of(first, kind, kwargs.get("dtype"))
    return _by_elements(func, name, args, kwargs, known)


def _kind(name: str, of: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return kind_of(name, of, of.source.numel, rest, kwargs)


def _accessed(func: Any, name: str, args: Sequence[Any]) -> Any:
    """A gradient that is read, or an attribute that is set: of what is whole, its part."""
    of, value = args[0], args[-1]
    is_set = name in ("grad", "data") and func.__name__ == "__set__"
    if is_set and isinstance(value, torch.Tensor):
        if isinstance(value, Known) and not _is_alike(of, value):
            raise refusal(name, of)
        own = plain(value)
        is_whole = own.shape != plain(of).shape and of.source.is_part
        args = of, _of(of.source, of.source.part(own).clone() if is_whole else own)
        note_whole(name, of, value, is_whole=is_whole)
    return func(*args)


def _is_alike(one: Any, other: Any) -> bool:
    """Whether elements of both meet as those of the wholes would."""
    return bool(one.source.is_like(other.source) and one.views == other.views)


def _by_elements(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], known: list[Any]
) -> Any:
    """A call that keeps elements where they are, or one on whole tensors."""
    first = next((x for x in known if x.source.is_part), known[0])
    is_part, alike = first.source.is_part, all(_is_alike(x, first) for x in known)
    missing = next((x for x in known if not x.source.is_everywhere), None)
    is_one = first.source.numel == 1 and not (first.views or first.is_complex())
    if missing is not None and name in _NUMBER and is_one:
        return called(func, (number_of(first),), kwargs)
    meets = missing is not None and meets_gradients(args, kwargs)
    writes = (name.endswith("_") and name[:2] != "__") or name in _PYTHON_WRITES
    out = kwargs.get("out")
    target = out if out is not None else [*args, *kwargs.values()][0] if writes else first
    if meets and not (writes and isinstance(target, Known) and not target.requires_grad):
        return _meeting(func, name, args, kwargs, missing)
    keeps = is_pointwise(name) or name in _WRITES | COPIES | _VIEWS
    if is_part and not keeps:
        return _answer(func, name, args, kwargs, first)
    if is_part and not (alike and isinstance(target, Known) and _fits(first, (args, kwargs))):
        raise refusal(name, first)
    if not is_part and any(isinstance(x, FakeTensor) for x in args):  # which knows none of ours
        return func(*pytree.tree_map_only(Known, plain, args), **kwargs)
    try:
        result = func(*args, **kwargs)
    except (RuntimeError, IndexError) as error:
        if is_part:
            raise refusal(name, first) from error
        raise
    if meets:
        lets_none_through(result, partial(refusal, name, missing, MEETS))
    if isinstance(result, Known) or not isinstance(result, torch.Tensor):
        if is_part and not isinstance(result, (Known, str)):
            raise refusal(name, first)
        return result  # what was written, or the name of a type
    if keeps and alike and result.numel() == first.numel():
        return _of(first.source, result, _views(name, args, kwargs, first, result))
    if is_part:
        raise refusal(name, first)
    return result


def _views(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], of: Any, result: torch.Tensor
) -> tuple[str, ...]:
    """How the result of a call stands to what the rank holds."""
    if name not in _VIEWS or name in ("view_as", "reshape_as"):  # which is of just such
        return of.views  # type: ignore[no-any-return]
    if result.dim() == 1 and (name in _FLAT or tuple(args[1:]) in ((-1,), ((-1,),))):
        return of.views if of.dim() == 1 else (*of.views, "flat")
    return (*of.views, f"{name}{args[1:]}{kwargs}")


def _meeting(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], of: Any) -> Any:
    """What a part gives with a tensor that has gradients, to which each rank would give those of
    its own elements alone: of a single number, what every rank has of it.
    """
    if of.source.numel > 1 or not is_pointwise(name):
        raise refusal(name, of, MEETS)
    args, kwargs = pytree.tree_map_only(Known, number_of, (tuple(args), kwargs))
    return called(func, args, kwargs)


def _fits(first: Any, given: Any) -> bool:
    """Whether other tensors of a call are numbers, or of just the elements that the rank holds:
    others would meet other elements than they would of the whole.
    """
    return all(
        isinstance(x, Known)
        or (x.numel() == 1 and x.dim() <= first.dim())
        or (x.shape == first.shape and not first.views and not spreads(x, first.source.shape))
        for x in pytree.tree_leaves(given)
        if isinstance(x, torch.Tensor)
    )


def _answer(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], of: Any) -> Any:
    """What is asked of a part: the whole's, or what is the same of any tensor."""
    if name in ("numel", "nelement"):
        return of.source.numel
    if name in _SIZES and not of.views:
        whole = torch.empty(of.source.shape, dtype=of.dtype, device="meta")
        return func(whole, *args[1:], **kwargs)
    if name in _OF_ANY or (name.lstrip("_").startswith("is_") and name not in _OF_ELEMENTS):
        return func(*args, **kwargs)
    raise refusal(name, of)


def _of_lists(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call on lists of tensors: element by element, but for norms and the search for infinity."""
    if name == "_foreach_norm":
        order = kwargs.get("ord", args[1] if len(args) > 1 else 2)
        dtype = kwargs.get("dtype", args[2] if len(args) > 2 else None)
        return [
            share_of(t, _kind("norm", t, (order,), {}), dtype)
            if isinstance(t, Known)
            else torch.linalg.vector_norm(t, order, dtype=dtype)
            for t in args[0]
        ]
    given = (*args, *kwargs.values())
    rows = [*zip(*(x for x in given if isinstance(x, (list, tuple))), strict=False)]
    single = [x for x in given if isinstance(x, torch.Tensor)]
    firsts = [_checked(name, row, single) for row in rows]
    result = func(*args, **kwargs)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        found_inf, owners = args[1], next(x for x in firsts if x is not None).source.owners
        every = owners.total(dict.fromkeys(owners.place, found_inf), "max")
        found_inf.copy_(every.clamp(min=0.0))
    if isinstance(result, (tuple, list)) and len(result) == len(rows):
        pairs = zip(result, firsts, strict=True)
        return [
            r if x is None or r.shape != x.shape else _of(x.source, r, x.views) for r, x in pairs
        ]
    return result


def _checked(name: str, row: Sequence[Any], single: Sequence[torch.Tensor]) -> Any:
    """Of what such a call has of one tensor, that whose elements its result has, if one is known.
    Raises `ConfigError` where parts are taken for wholes.
    """
    known = [x for x in row if isinstance(x, Known)]
    first = next((x for x in known if x.source.is_part), known[0] if known else None)
    alike = all(_is_alike(x, first) for x in known)
    if meets_gradients(row, single) and not all(x.source.is_everywhere for x in known):
        raise refusal(name, first, MEETS)
    if first is None or not first.source.is_part:
        return first if alike else None
    op = name.removeprefix("_foreach_")
    pointwise = is_pointwise(op) and op not in REDUCTIONS
    keeps = op == name or op in _WRITES | COPIES or pointwise
    target = row[0] if name.endswith("_") else first
    if not (keeps and alike and isinstance(target, Known) and _fits(first, (row, single))):
        raise refusal(name, first)
    return first

"""Numbers of parameters and gradients that ranks hold parts of: a rank's shares of them, until they
are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.errors import ConfigError
from merakc.runtime.part import OfAWhole, plain
from merakc.train.parameters.norms import NOTHING
from merakc.train.parameters.numbers import NORMS, Kind, Term, kind_of, total, values_of

# What stays one rank's share of a number.
_CARRIES = {"to", "clone", "detach", "float", "double", "cpu", "cuda"}

MEETS = (
    "with a tensor that has gradients, which would be those of a rank's own elements alone: reduce "
    "the parameter first (`x * p.sum()`, `x + p.norm()`), do this in the model's forward, or keep "
    'it whole on every rank (tp=1, pp=1, state_shards="zero-0"). Otherwise: '
)

_SIZES = {"shape", "size", "dim", "ndim", "numel", "dtype", "device", "is_floating_point"}


class Share(torch.Tensor):
    """One rank's shares of numbers: a scalar of one, or a row of several. What reads their values
    communicates, so that every rank must read them; `found` are these, from then on.

    It has no memory: what torch reads without asking Python's functions is answered, too.
    """

    terms: tuple[Term, ...]
    found: torch.Tensor | None

    @staticmethod
    def __new__(cls: type[Share], terms: tuple[Term, ...], shape: tuple[int, ...]) -> Share:
        """Of the dtype and on the device of the first."""
        first = terms[0]
        made: Share = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=first.dtype, device=first.own.device
        )
        made.terms, made.found = terms, None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """A call with shares among its arguments."""
        return called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """A call of torch's own, below."""
        args, kwargs = pytree.tree_map_only(Share, _values, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def share_of(
    of: Any,
    made: tuple[Kind, Callable[[torch.Tensor], torch.Tensor]],
    dtype: torch.dtype | None = None,
) -> Share:
    """This rank's share of a number of a parameter or a gradient, made as `kind_of` says, of the
    elements in that dtype.
    """
    kind, number = made
    values = plain(of) if dtype is None else plain(of).to(dtype)
    if values.numel():
        result = number(values)
        dtype, own = result.dtype, result.double()
    else:  # of another rank's parameter, or an empty part
        dtype, nothing = number(values.new_ones(1)).dtype, NOTHING[kind.combine]
        own = torch.full((), nothing, dtype=torch.float64, device=values.device)  # of no bool
        real = values.abs() if values.is_complex() else values
        own = own + real.double().sum()  # nothing, whose gradient is an empty part
    if kind.root != 1.0 or kind.divisor > 1:
        dtype = values.dtype.to_real()
    return Share((Term(of.source, own.double(), kind, dtype),), ())


def number_of(of: Any) -> Share:
    """A parameter of one element, as every rank has it."""
    made = kind_of("sum", of, 1, (), {})
    assert made is not None, "what is summed has a kind"
    return Share(share_of(of, made).terms, of.source.shape)


def meets_gradients(*given: Any) -> bool:
    """Whether tensors of a call that are no parameter's are to have gradients."""
    return torch.is_grad_enabled() and any(
        x.requires_grad
        for x in pytree.tree_leaves(given)
        if isinstance(x, torch.Tensor) and not isinstance(x, OfAWhole)
    )


def lets_none_through(written: torch.Tensor, refusal: Callable[[], Exception]) -> None:
    """What was written into a tensor without gradients, such as a gradient that is scaled by a
    norm, stands for its values: an error if it is differentiated.
    """

    def refuse(_: torch.Tensor) -> None:
        raise refusal()

    if written.requires_grad:
        written.register_hook(refuse)  # type: ignore[no-untyped-call]


def called(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What becomes of shares: others that need no values yet, one norm of many, or values."""
    with torch._C.DisableTorchFunctionSubclass():
        name = func.__name__
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(x.found is not None for x in leaves if isinstance(x, Share)):
            found = _unread(func, name, args, kwargs)
            if found is not None:
                return found
        args, kwargs = pytree.tree_map_only(Share, _values, (tuple(args), kwargs))
    return func(*args, **kwargs)


def _unread(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not args:
        return None
    first = args[0]
    if name == "stack" and isinstance(first, (list, tuple)) and not kwargs and len(args) == 1:
        if all(isinstance(s, Share) and not s.dim() for s in first):
            return Share(tuple(t for s in first for t in s.terms), (len(first),))
        return None
    if not isinstance(first, Share):
        return None
    others = pytree.tree_leaves((args[1:], kwargs))
    if name in _SIZES or (name == "__get__" and func.__self__.__name__ in _SIZES):
        return func(_empty(first), *args[1:], **kwargs)
    if name in _CARRIES and not any(isinstance(x, Share) for x in others):
        like = func(_empty(first), *args[1:], **kwargs)
        terms = (Term(t.source, t.own.to(like.device), t.kind, like.dtype) for t in first.terms)
        return Share(tuple(terms), tuple(first.shape))
    if name in NORMS and first.dim() == 1:
        kind = kind_of(name, first, 1, args[1:], kwargs)
        if kind is not None and all(t.kind == kind[0] for t in first.terms):
            return total(first.terms, kind[0])
    return None


def _empty(share: Share) -> torch.Tensor:
    return torch.empty(tuple(share.shape), dtype=share.dtype, device=share.device)


def _values(share: Share) -> torch.Tensor:
    """The numbers of the whole, of which these are the shares."""
    if share.found is None:
        share.found = torch.stack(values_of(share.terms)).view(tuple(share.shape))
    return share.found


def refusal(name: str, of: Any, why: str = "") -> ConfigError:
    """The error of a call that would take a part of a parameter or gradient for all of it."""
    source, held = of.source, plain(of).numel()
    has = f"{held} of" if held < source.numel else "all, and others none, of the"
    return ConfigError(
        f"torch.{name.strip('_')} is called on '{source.name}' or its gradient, of which this rank "
        f"holds {has} {source.numel} elements: {why}ranks would take what they have for all. Norms,"
        " sums, means, largest and smallest elements are those of the whole, and what is computed "
        "element by element is right; model.full_state_dict() and model.full_gradients() give "
        "whole tensors on rank 0, .detach().as_subclass(torch.Tensor) this rank's elements"
    )

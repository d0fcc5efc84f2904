"""Tensors that are not there yet: what is asked of them is answered, or their values are fetched.

They stand for what a call of the model returns. Shapes and dtypes are known; calls on them go to
the call of the model that they come of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree

from merakc.errors import ConfigError

# What a tensor tells without its values: attributes, and methods.
_ATTRIBUTES = frozenset({
    "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "grad_fn", "names",
})  # fmt: skip
_METHODS = frozenset({
    "size", "dim", "numel", "nelement", "ndimension", "stride", "is_floating_point", "is_complex",
    "is_signed", "is_contiguous", "element_size", "get_device", "__len__", "storage_offset",
    "is_same_size", "is_tensor",
})  # fmt: skip


_EVALUATION = (
    "backward() of what a call in evaluation mode gives, of which no step was taken: call "
    "model.train() before the loop (from_pretrained returns models in evaluation mode)"
)


class Source(Protocol):
    """What deferred tensors come of."""

    def apply(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a call on deferred tensors gives."""

    def value(self, place: int) -> torch.Tensor:
        """The value of the tensor at a place."""

    def join(self, other: Source) -> bool:
        """Whether both are one, from here on: all tensors of both come of one of the two."""


class Deferred(torch.Tensor):
    """A tensor at a `place` of what a `source` will have."""

    source: Source
    place: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_about(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (source := _joined((args, kwargs))) is None:
            args, kwargs = values_in((args, kwargs))
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(
            Deferred, lambda x: x if x.source is source else x.source.value(x.place), (args, kwargs)
        )
        return source.apply(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ConfigError(
            f"{func} is called on an output of the model that is not there yet, past "
            "__torch_function__; take its value first (x.detach().clone()), or compute this in "
            "auto_parallel(..., loss=fn)"
        )


def deferred_in(tree: Any) -> list[Deferred]:
    """The deferred tensors among the arguments of a call."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Deferred)]


def _joined(tree: Any) -> Source | None:
    """What all deferred tensors that a gradient may go through come of, made one where they come of
    several; None where they cannot, or where there is no such tensor and they come of several.
    """
    found = deferred_in(tree)
    if all(x.source is found[0].source for x in found):
        return found[0].source
    trained = [x for x in found if x.requires_grad and torch.is_grad_enabled()]
    if not trained or not all(trained[0].source.join(x.source) for x in trained):
        return None
    for each in found:  # which may be computed in the step
        trained[0].source.join(each.source)
    return trained[0].source


def values_in(tree: Any) -> Any:
    """The same with the values of such tensors, as in the batch of another model. Collective."""
    if not deferred_in(tree):
        return tree
    return pytree.tree_map_only(Deferred, lambda x: x.source.value(x.place), tree)


def meets_parameters(given: Any) -> bool:
    """Whether one number, the loss so far, meets what has a gradient outside the model: a penalty
    on parameters.
    """
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
    outside = [x for x in tensors if not isinstance(x, Deferred) and x.requires_grad]
    losses = {x.place: x for x in tensors if isinstance(x, Deferred)}
    is_loss = len(losses) == 1 and all(x.numel() == 1 and x.requires_grad for x in losses.values())
    return bool(outside) and is_loss and torch.is_grad_enabled()


def deferred(
    source: Source, place: int, like: torch.Tensor, device: torch.device, why: str
) -> Deferred:
    """A tensor that is not there yet, of the form of another; `why` nothing is differentiated
    through it past its source.
    """

    def made() -> Deferred:
        found: Deferred = torch.Tensor._make_wrapper_subclass(
            Deferred, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        return found

    found = unreachable(made, why) if like.requires_grad else made()
    found.source, found.place = source, place
    return found


def unreachable(made: Callable[[], Any], why: str) -> Any:
    """A tensor that says it has a history, and raises `ConfigError` where that is gone back."""
    return _Unreachable.apply(torch.empty(0, requires_grad=True), made, why)  # type: ignore[no-untyped-call]


def of_evaluation(tensor: torch.Tensor) -> torch.Tensor:
    """What a call gives that trains nothing, where one process could go back through it."""
    if not torch.is_grad_enabled() or not tensor.is_floating_point():
        return tensor
    found: torch.Tensor = unreachable(lambda: tensor, _EVALUATION)
    return found


class _Unreachable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, made: Callable[[], Any], why: str) -> Any:
        ctx.why = why
        return made()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ConfigError(ctx.why)


def _is_about(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _ATTRIBUTES
    return name in _METHODS

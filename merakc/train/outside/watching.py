"""What calls on outputs do while they are noted: drawing, writing, and asking for sizes."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

REMEDY = "give auto_parallel the loss: auto_parallel(model, batch, loss=fn), fn(outputs, batch)"


class WritesError(Exception):
    """A call is about to write into the memory of `target`, an output's stand-in."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target


@dataclass(frozen=True)
class OnACopy:
    """A call that writes into its first argument, made on a copy of that, which it gives."""

    func: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return named(self.func)

    def __call__(self, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The copy."""
        copy = target.clone()
        self.func(copy, *args, **kwargs)
        return copy


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether random numbers are `drawn` while it is entered, and whether something `copies` a
    tensor as it is, as `reshape` and `contiguous` do by the strides, which may be others when it
    runs. Raises `WritesError` before anything is written into the memory of one of the `outputs`.
    """

    def __init__(self, outputs: Collection[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn, self.copies, self.outputs = False, False, {memory(x): x for x in outputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.drawn |= torch.Tag.nondeterministic_seeded in func.tags
        self.copies |= func in _COPIES
        for target in _written(func, args, kwargs):
            if (found := self.outputs.get(memory(target))) is not None:
                raise WritesError(found)
        return func(*args, **kwargs)


_COPIES = torch.ops.aten.clone.default, torch.ops.aten._to_copy.default


def makes_new(func: Any, copies: bool) -> bool:
    """Whether a call that returned a tensor of new memory always does, whatever the strides."""
    return not copies or isinstance(func, OnACopy) or func in (torch.clone, torch.Tensor.clone)


def memory(tensor: torch.Tensor) -> int:
    """What tensors have in common that share memory, while they live."""
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op writes into."""
    if not func._schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[k] if k < len(args) else kwargs.get(argument.name)
        several = given if isinstance(given, (list, tuple)) else [given]
        found += [x for x in several if isinstance(x, torch.Tensor)]
    return found


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets calls whose sizes depend on masks and counts run where only these have values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.masked_select.default:
            shape = torch.broadcast_shapes(*(x.shape for x in args))  # type: ignore[no-untyped-call]
            chosen, mask = (x.expand(shape) for x in args)
            func, args = torch.ops.aten.index.Tensor, (chosen, [mask])
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [place for index in args[1] for place in _places(index)]
        return func(*args, **(kwargs or {}))


def _places(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """The indices that a mask is for."""
    is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
    if index is None or not is_mask or isinstance(index, FakeTensor):
        return (index,)
    return index.nonzero(as_tuple=True)


def with_open_size(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a view with -1 for its first size: the same of this batch, and of parts of
    it what Python would have told of them (`B, T, C = x.shape; x.view(B * T, C)`).
    """
    if getattr(func, "__name__", "") not in ("view", "reshape") or len(args) < 2:
        return args
    sizes = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
    if not all(type(n) is int and n > 0 for n in sizes):
        return args
    return args[0], (-1, *sizes[1:])


def writes(func: Callable[..., Any]) -> str:
    """The refusal of a call that writes where a step would not hear of it."""
    return (
        f"{named(func)} writes into an output of the model, which is not there yet, or into what "
        f"shares its memory; use a call that returns a new tensor, or {REMEDY}"
    )


def named(func: Any) -> str:
    """What a function is called, of an attribute with its own."""
    owner = getattr(func, "__self__", None)
    name = str(getattr(func, "__name__", func))
    return f"{getattr(owner, '__name__', '')}.{name}" if isinstance(
        owner, (types.GetSetDescriptorType, types.MemberDescriptorType)) else name  # fmt: skip

"""A loss outside the model: it and the forward as one module, under the model's own names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn

from merakc.errors import ConfigError
from merakc.frontend.values.structures import open_dataclasses

# The loss of a model's outputs and its batch: as keywords in a dict, as positions in a tuple, or
# the one that there is.
LossFunction = Callable[[Any, Any], torch.Tensor]


class LossAndOutputs(NamedTuple):
    """What a call of a model gives whose loss is computed outside it."""

    loss: torch.Tensor
    outputs: Any


class WithLoss(nn.Module):
    """A model and the `loss` of its outputs; without one, the model alone.

    All modules, parameters and buffers are the model's, under its names. Of a batch the model is
    given what its forward takes; the loss is given all.
    """

    model: nn.Module
    loss: LossFunction | None

    def __init__(self, model: nn.Module, loss: LossFunction | None) -> None:
        super().__init__()
        vars(self).update(model=model, loss=loss)  # no child: names would have a prefix
        if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
            raise ConfigError(
                f"loss={type(loss).__name__} has parameters of its own, which auto_parallel would "
                "not train; make it a part of the model, whose forward returns the loss then"
            )

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Those of the model."""
        yield from self.model.named_modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """That of the model."""
        return self.model.get_submodule(target)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Those of the model, and of the loss: all whose modes count."""
        yield from super().modules(remove_duplicate)
        if isinstance(self.loss, nn.Module):
            yield from self.loss.modules()

    def _get_name(self) -> str:
        return str(self.model._get_name())  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, with their loss if there is one."""
        signature = inspect.signature(self.model.forward)
        own_args, own_kwargs = _taken(signature, args, kwargs)
        outputs = self.model(*own_args, **own_kwargs)
        if self.loss is None:
            return outputs
        loss: Any = self.loss(outputs, _batch(signature, args, kwargs))
        if loss is None and self.loss is stand_in:
            return outputs
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            told = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else (
                f"a {type(loss).__name__}")  # fmt: skip
            raise ConfigError(
                f"loss={_name(self.loss)} returns {told}; it must return one number to train on, "
                "as a tensor: fn(outputs, batch) -> loss"
            )
        return LossAndOutputs(loss, outputs)


def parted(model: nn.Module) -> tuple[nn.Module, LossFunction | None]:
    """The model itself, and the loss that is outside it, if there is one."""
    return (model.model, model.loss) if isinstance(model, WithLoss) else (model, None)


def stand_in(outputs: Any, _: Any) -> Any:
    """The loss that a plan is made with where nothing says the loss: means of what is trained; None
    where nothing is.
    """
    open_dataclasses(outputs)
    leaves = (x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor))
    means = [x.mean() for x in leaves if x.is_floating_point() and x.requires_grad]
    return sum(means) if means else None


def _taken(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of a batch, what a forward takes: as many positions and the keywords that it has."""
    kinds = [p.kind for p in signature.parameters.values()]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(kind in by_position for kind in kinds)
    every = inspect.Parameter.VAR_KEYWORD in kinds
    return (
        tuple(args if inspect.Parameter.VAR_POSITIONAL in kinds else args[:count]),
        {n: v for n, v in kwargs.items() if every or n in signature.parameters},
    )


def _batch(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A batch as the loss is given it; where some of it is by position, that has its names."""
    if not args:
        return dict(kwargs)
    if not kwargs:
        return args[0] if len(args) == 1 else tuple(args)
    names = list(signature.parameters)
    if len(args) > len(names):
        raise ConfigError(
            f"the batch is {len(args)} values by position and {', '.join(kwargs)} by keyword, and "
            f"the forward has names for {len(names)}; give all by keyword, so that the loss can "
            "tell them"
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _name(loss: LossFunction) -> str:
    return str(getattr(loss, "__qualname__", type(loss).__name__))

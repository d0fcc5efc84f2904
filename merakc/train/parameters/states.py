"""State dicts of optimizers, which say of which parts of parameters their tensors are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from merakc.errors import ConfigError
from merakc.runtime.part import TensorPart, local_of, place_of, plain
from merakc.train.parameters.elements import HeldParameter, tell_state
from merakc.train.parameters.optimizers import (
    bringing,
    check,
    copied,
    is_together,
    updated_whole,
)
from merakc.train.parameters.places import elsewhere
from merakc.train.parameters.stepping import behind


@cache
def tag_optimizers() -> None:
    """Lets the state dicts of all optimizers say of which parts their tensors are.

    torch has no hook that every optimizer runs, from before its first step on.
    """
    kind = Optimizer
    kind.state_dict = _saying_parts(kind.state_dict)  # type: ignore[method-assign]
    kind.load_state_dict = _taking_parts(kind.load_state_dict)  # type: ignore[method-assign]
    behind.append(_tell)


def _tell(optimizer: Optimizer) -> None:
    """Lets the state that a step has made say of which parts of parameters it is; not that of
    whole ones, which one rank has.
    """
    if optimizer in bringing:
        return
    for p in _parameters(optimizer):
        if isinstance(p, HeldParameter) and p in optimizer.state:
            tell_state(p, optimizer.state[p])


def _saying_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def state_dict(self: Optimizer) -> Any:
        found = original(self)
        parameters = _parameters(self)
        if not is_together(self) and any(
            place_of(p) is not None or p in elsewhere for p in parameters
        ):
            found["state"] = {
                k: tagged_state(self, parameters[k], s)
                for k, s in found["state"].items()
                if parameters[k] not in elsewhere
            }
        return found

    return state_dict


def _taking_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_state_dict(self: Optimizer, state_dict: Any) -> Any:
        parameters = _parameters(self)
        if any(place_of(p) is not None or p in elsewhere for p in parameters):
            check(self)
            if is_together(self):
                return original(self, state_dict)
            whole = updated_whole(self)
            keys = [k for group in state_dict["param_groups"] for k in group["params"]]
            owner = dict(zip(keys, parameters, strict=False))
            state = {
                k: s
                if k not in owner or owner[k] in whole
                else {n: _taken(self, owner[k], n, v) for n, v in s.items()}
                for k, s in state_dict["state"].items()
                if k not in owner or (owner[k] not in elsewhere and whole.get(owner[k], True))
            }
            state_dict = {**state_dict, "state": state}
        return original(self, state_dict)

    return load_state_dict


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def tagged_state(
    optimizer: Optimizer, parameter: torch.Tensor, state: Mapping[str, Any]
) -> dict[str, Any]:
    """An optimizer's state of one parameter, with tensors that say which part they are; whole
    where the optimizer needs that, on the rank that updates the parameter, and nothing on others.

    Raises `ConfigError` for state of a part that belongs to no elements of it.
    """
    place, whole = place_of(parameter), updated_whole(optimizer)
    state = {k: plain(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    if place is None or parameter in whole:
        return state if whole.get(parameter, True) else {}
    parameter = plain(parameter)
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
            value = TensorPart(value, place)
        elif isinstance(value, torch.Tensor) and value.dim():
            raise ConfigError(
                f"the optimizer's '{key}' of '{place.name}' is {tuple(value.shape)}, not as the "
                f"parameter's part, {tuple(parameter.shape)}: what it means for the whole "
                "parameter is not known, so it can be saved neither by this nor for another plan; "
                "use an elementwise optimizer such as AdamW"
            )
        found[key] = value
    return found


def _taken(optimizer: Optimizer, parameter: torch.Tensor, key: str, value: Any) -> Any:
    place = place_of(parameter)
    if not isinstance(value, torch.Tensor) or place is None:
        return value
    if not value.dim() and key not in keys_of_one(optimizer, place.shape):
        return value
    return local_of(parameter, value)


def keys_of_one(optimizer: Optimizer, shape: tuple[int, ...]) -> set[str]:
    """What an optimizer keeps of the element of a parameter that is a single number, whose shape a
    count of steps has, too: what it keeps of one that has a dim. None of other shapes.
    """
    if shape:
        return set()
    device = _parameters(optimizer)[0].device
    groups = [[nn.Parameter(torch.ones(1, device=device))] for _ in optimizer.param_groups]
    made = copied(optimizer, groups)
    for parameter in (p for group in groups for p in group):
        parameter.grad = torch.ones_like(parameter)
    with torch.random.fork_rng(devices=[]):
        made.step()
    return {
        key
        for state in made.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == (1,)
    }

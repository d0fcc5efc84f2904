"""Which part of each tensor a rank has, and state dicts that say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from merakc.errors import ConfigError
from merakc.runtime.groups import Groups
from merakc.runtime.part import Place, TensorPart, local_of, place_of, places
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.state import Placement


def register_places(
    state: Mapping[str, torch.Tensor],
    placements: Mapping[str, Placement],
    groups: Groups,
    sharded: ShardedState | None,
) -> None:
    """Remembers of each parameter and buffer which part of the whole tensor it is, if it is one."""
    dp, pipeline_rank, tp_rank = groups.coordinates
    bucket_of = sharded.bucket_of if sharded else {}
    for name, tensor in state.items():
        where = placements[name]
        layout, tp = where.layout, groups.mesh.tp
        writes = where.owner == pipeline_rank and (layout.is_split or tp_rank == 0)
        bucket = bucket_of.get(name)
        shards = bucket.groups.shards.optimizer if bucket else 1
        if bucket is not None and shards > 1:
            member, first = bucket.members[name], bucket.owned_at
            bounds = (first, first + bucket.owned_size)
            start, stop = (min(max(b, member.start), member.stop) - member.start for b in bounds)
            writes = writes and dp < shards
        elif layout.is_split:
            start, stop, writes = 0, tensor.numel(), writes and dp == 0
        else:
            continue
        places[tensor] = Place(name, layout, tp, tp_rank, start, stop, writes)
    _tag_optimizers()


# Empty stand-ins of others' parameters, and the shapes of these.
elsewhere: WeakIdKeyDictionary = WeakIdKeyDictionary()


def stand_in(place: Placement, device: torch.device) -> nn.Parameter:
    """An empty parameter for one that other pipeline ranks hold: names, groups of optimizers and
    calls are the same on all ranks then. Of as many dims, by which people group parameters.
    """
    shape = place.layout.shape
    empty = torch.empty((0,) * max(1, len(shape)), dtype=place.dtype, device=device)
    made = nn.Parameter(empty, requires_grad=place.requires_grad)
    elsewhere[made] = shape
    return made


@cache
def _tag_optimizers() -> None:
    """Lets the state dicts of all optimizers say of which parts their tensors are.

    torch has no hook that every optimizer runs, from before its first step on.
    """
    kind = torch.optim.Optimizer
    kind.state_dict = _saying_parts(kind.state_dict)  # type: ignore[method-assign]
    kind.load_state_dict = _taking_parts(kind.load_state_dict)  # type: ignore[method-assign]


def _saying_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def state_dict(self: torch.optim.Optimizer) -> Any:
        found = original(self)
        parameters = _parameters(self)
        if any(place_of(p) is not None or p in elsewhere for p in parameters):
            found["state"] = {
                k: tagged_state(parameters[k], s)
                for k, s in found["state"].items()
                if parameters[k] not in elsewhere
            }
        return found

    return state_dict


def _taking_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: Any) -> Any:
        parameters = _parameters(self)
        if any(place_of(p) is not None or p in elsewhere for p in parameters):
            keys = [k for group in state_dict["param_groups"] for k in group["params"]]
            owner = dict(zip(keys, parameters, strict=False))
            state = {
                k: {n: _taken(owner[k], v) for n, v in s.items()} if k in owner else s
                for k, s in state_dict["state"].items()
                if k not in owner or owner[k] not in elsewhere
            }
            state_dict = {**state_dict, "state": state}
        return original(self, state_dict)

    return load_state_dict


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def tagged_state(parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state of one parameter, with tensors that say which part they are.

    Raises `ConfigError` for state of a part that belongs to no elements of it.
    """
    place = place_of(parameter)
    if place is None:
        return dict(state)
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


def check_given(
    given: Mapping[str, Any], own: Mapping[str, Any], whole: Mapping[str, torch.Tensor]
) -> None:
    """Raises `ConfigError` for tensors of a state dict that are neither whole nor this rank's own
    parts: before any is loaded.
    """
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) or name not in whole:
            continue
        if value.shape != whole[name].shape:
            raise ConfigError(
                f"'{name}' is given as {tuple(value.shape)}, and the whole is "
                f"{tuple(whole[name].shape)}"
            )
        if isinstance(value, TensorPart) and name in own:
            local_of(own[name], value)


def _taken(parameter: torch.Tensor, value: Any) -> Any:
    place = place_of(parameter)
    if not isinstance(value, torch.Tensor) or place is None or not value.dim():
        return value
    return local_of(parameter, value)

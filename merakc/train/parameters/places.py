"""Which part of each tensor a rank has, and state dicts that say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from merakc.errors import ConfigError
from merakc.runtime.groups import Groups
from merakc.runtime.health.job import all_ranks
from merakc.runtime.part import Place, TensorPart, local_of, places
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.state import Placement


def register_places(
    state: Mapping[str, torch.Tensor],
    placements: Mapping[str, Placement],
    groups: Groups,
    sharded: ShardedState | None,
) -> None:
    """Remembers of each parameter and buffer which part of the whole tensor it is, if it is one."""
    _, pipeline_rank, lane = groups.coordinates
    bucket_of = sharded.bucket_of if sharded else {}
    for name, tensor in state.items():
        where = placements[name]
        sharers = where.sharers(groups.mesh)
        layout, part = where.layout, lane % sharers.tp
        place = sharers.state_rank(groups.rank)
        writes = where.owner == pipeline_rank and layout.holder(part) == part
        bucket = bucket_of.get(name)
        shards = bucket.groups.shards.optimizer if bucket else 1
        if bucket is not None and shards > 1:
            start, stop = bucket.bounds(name, bucket.groups.owned_index)
            writes = writes and place < shards
        elif layout.is_split:
            start, stop, writes = 0, tensor.numel(), writes and place == 0
        else:
            continue
        places[tensor] = Place(name, layout, sharers.tp, part, start, stop, writes)


# Empty stand-ins of others' parameters and buffers, and the shapes of these.
elsewhere: WeakIdKeyDictionary = WeakIdKeyDictionary()


def stand_in(place: Placement, device: torch.device) -> nn.Parameter:
    """An empty parameter for one that other pipeline ranks hold: names, groups of optimizers and
    calls are the same on all ranks then. Of as many dims, by which people group parameters.
    """
    made = nn.Parameter(absent(place, device), requires_grad=place.requires_grad)
    elsewhere[made] = place.layout.shape
    return made


def absent(place: Placement, device: torch.device) -> torch.Tensor:
    """Nothing, in the place of a tensor that other pipeline ranks hold."""
    dims = max(1, len(place.layout.shape))
    return torch.empty((0,) * dims, dtype=place.dtype, device=device)


def check_here(module: nn.Module) -> None:
    """Raises `ConfigError`, on all ranks, where a part of the model has tensors that some pipeline
    ranks hold nothing of, so that a loop over them would pass over these.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        source = getattr(tensor, "source", None)
        if source is None:
            continue
        ranks, pp = source.owners.placements[source.name].ranks, source.owners.groups.mesh.pp
        if len(ranks) < pp:
            raise ConfigError(
                f"state_dict() of a part of the model: pipeline ranks {list(ranks)} of {pp} "
                f"hold '{source.name}', and the others would have nothing of it; model.state_dict()"
                " is what this rank has of all, model.full_state_dict() is whole, on rank 0; to "
                "copy one network of a model to another, train with pp=1, or keep the other as a "
                "model of its own"
            )


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


def load_all(
    load: Callable[..., Any], given: Mapping[str, Any], strict: bool, groups: Groups
) -> Any:
    """What torch's `load_state_dict` says of a state dict: on every rank, the missing keys of all
    stages. Raises `RuntimeError` for them, and for keys that no stage has, if `strict`.
    """
    if groups.mesh.pp == 1:
        return load(given, strict)
    keys = load(given, False)
    every: list[list[str]] = [[] for _ in range(groups.mesh.world_size)]
    dist.all_gather_object(every, keys.missing_keys, all_ranks())
    keys.missing_keys[:] = dict.fromkeys(name for names in every for name in names)
    kinds = {"Missing": keys.missing_keys, "Unexpected": keys.unexpected_keys}
    said = [f"{kind} key(s) in state_dict: {', '.join(k)}." for kind, k in kinds.items() if k]
    if strict and said:
        raise RuntimeError(f"Error(s) in loading state_dict: {' '.join(said)}")
    return keys


def check_reach(kind: str, held: Mapping[str, ShardedState | None]) -> None:
    """Raises `ConfigError` where an optimizer that needs tensors of other ranks has some that are
    updated on the host, from which a GPU's collectives bring none.
    """
    for name, sharded in held.items():
        bucket = sharded.bucket_of.get(name) if sharded else None
        if bucket is not None and bucket.on_host and bucket.device.type != "cpu":
            raise ConfigError(
                f"{kind} needs whole tensors of other ranks, and the plan has the state of "
                f"'{name}' on the host: give auto_parallel offload='none', or use an optimizer "
                "that updates every element by itself, such as AdamW"
            )

"""The state that a checkpoint has for optimizers, in memory of theirs, under any plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from merakc.errors import CheckpointError
from merakc.files.printable import count_of
from merakc.runtime.part import TensorPart, place_of, plain
from merakc.train.checkpoints.codec import decode
from merakc.train.checkpoints.manifest import OPTIMIZER, Manifest, stored_name
from merakc.train.checkpoints.run_state import Tensors, first_name, names_of
from merakc.train.parameters.optimizers import check, updated_whole
from merakc.train.parameters.places import elsewhere
from merakc.train.parameters.states import keys_of_one


def states_for(
    model: nn.Module, optimizers: list[Any], manifest: Manifest
) -> tuple[list[Any], Tensors]:
    """State dicts for the optimizers, and their tensors, to be written into."""
    records = manifest.run.get("optimizers", [])
    if optimizers and len(optimizers) != len(records):
        raise CheckpointError(
            f"{count_of(len(optimizers), 'optimizer')} are given, and {len(records)} were saved"
        )
    keys: dict[str, list[str]] = {}
    for name in manifest.tensors:
        if name.startswith(OPTIMIZER):
            parameter, _, key = stored_name(name).removeprefix("state.").rpartition(".")
            keys.setdefault(parameter, []).append(key)
    names, found = names_of(model), []
    tensors: Tensors = {}
    for optimizer, record in zip(optimizers, records, strict=False):
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        if kind != record["kind"]:
            raise CheckpointError(f"the optimizer is a {kind}, and a {record['kind']} was saved")
        state: dict[int, Any] = {}
        groups, number = [], 0
        check(optimizer)
        whole = updated_whole(optimizer)
        for k, group in enumerate(optimizer.param_groups):
            own = []
            for p in group["params"]:
                if p not in elsewhere:
                    name = first_name(names, p)
                    own.append(name)
                if p not in elsewhere and whole.get(p, True):
                    state[number] = _state(name, p, optimizer, keys, manifest, tensors)
                    state[number] |= decode(record["scalars"].get(name, {}), {})
                number += 1
            options = _options(k, own, record, len(optimizer.param_groups))
            options = {name: _like(group.get(name), v) for name, v in options.items()}
            before = number - len(group["params"])
            groups.append({**group, **options, "params": list(range(before, number))})
        _check_members(optimizer, names, record)
        state = {k: v for k, v in state.items() if v}
        found.append({"state": state, "param_groups": groups})
    return found, tensors


def _like(own: Any, saved: Any) -> Any:
    """A saved option as the optimizer has it: a learning rate may be a tensor."""
    if isinstance(own, torch.Tensor) and isinstance(saved, (int, float)):
        return torch.full_like(own, saved)
    if isinstance(own, tuple) and isinstance(saved, tuple) and len(own) == len(saved):
        return tuple(map(_like, own, saved))
    return saved


def _check_members(
    optimizer: Any, names: Mapping[torch.Tensor, str], record: Mapping[str, Any]
) -> None:
    """Raises `CheckpointError` for saved parameters that the optimizer has not."""
    own = {first_name(names, p) for group in optimizer.param_groups for p in group["params"]}
    saved = (name for group in record["groups"] for name in group["names"])
    if lost := next((name for name in saved if name not in own), None):
        raise CheckpointError(
            f"the saved {type(optimizer).__name__} has '{lost}', which is in none of this one's "
            "groups: give it the parameters that it had, with add_param_group() where they came "
            "later"
        )


def _state(
    name: str,
    p: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    keys: Mapping[str, list[str]],
    manifest: Manifest,
    tensors: Tensors,
) -> dict[str, Any]:
    """One parameter's state, in memory that it has already where it has any."""
    found: dict[str, Any] = {}
    place, before, parameter = place_of(p), optimizer.state.get(p, {}), plain(p)
    whole = shape_here = tuple(parameter.shape)
    if place is not None:
        whole = place.shape
        if p in updated_whole(optimizer):  # by this rank
            shape_here, place = whole, None
    for key in keys.get(name, ()):
        full = f"{OPTIMIZER}state.{name}.{key}"
        stored = manifest.tensors[full]
        is_one = place is not None and key in keys_of_one(optimizer, whole)
        elementwise = is_one or (bool(stored.shape) and stored.shape == whole)
        if stored.shape and not elementwise and place is not None:
            raise CheckpointError(
                f"the optimizer's '{key}' of '{name}' is {stored.shape}, not of the parameter's "
                f"shape {whole}, and this rank holds a part of the parameter; load it under a plan "
                "that leaves parameters whole"
            )
        dtype = (
            p.dtype if elementwise and stored.torch_dtype.is_floating_point else stored.torch_dtype
        )
        shape = shape_here if elementwise else stored.shape
        own, old = parameter.detach().new_empty(shape, dtype=dtype), before.get(key)
        old = plain(old) if isinstance(old, torch.Tensor) else None
        if old is not None and old.shape == own.shape and old.dtype == dtype:
            own = old
        elif not elementwise and not stored.shape:
            own = own.cpu()
        found[key] = TensorPart(own, place) if place is not None and elementwise else own
        tensors[full] = found[key]
    return found


def _options(k: int, own: list[str], record: Any, count: int) -> dict[str, Any]:
    """The options of a parameter group with these members."""
    groups = record["groups"]
    member_of = {name: n for n, group in enumerate(groups) for name in group["names"]}
    if unknown := [name for name in own if name not in member_of]:
        raise CheckpointError(
            f"the optimizer's group {k} has '{unknown[0]}', of which none was saved"
        )
    among = {member_of[name] for name in own} or ({k} if len(groups) == count else set())
    if len(among) > 1:
        first = sorted(among)
        options = [groups[n]["options"] for n in first]
        if any(o != options[0] for o in options):
            raise CheckpointError(
                f"the optimizer's group {k} has members of the saved groups {first}, which have "
                "other options; group the parameters as they were"
            )
    for n in sorted(among):
        options_of: dict[str, Any] = decode(groups[n]["options"], {})
        return options_of
    return {}

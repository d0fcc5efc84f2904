"""`full_state_dict=True` of torch's `get_state_dict`: whole tensors, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, wraps
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict

from merakc.runtime.health.job import all_ranks, call
from merakc.runtime.part import Place, TensorPart
from merakc.train.model import ParallelModel

Path = tuple[Any, ...]


class _Index(int):
    """Where something stands in a list, apart from a number that is the key of a dict."""


@dataclass(frozen=True)
class _Said:
    """What a rank holds at one place of a state dict: a value, a whole tensor, or a part of one."""

    value: Any = None
    shape: torch.Size | None = None  # of the whole tensor
    dtype: torch.dtype | None = None
    place: Place | None = None  # of a part


@cache
def gather_on_request() -> None:
    """Lets torch's `get_state_dict` and its like gather the state of parallel models.

    torch gathers DTensors and takes everything else for whole; a rank's parts, and its stages
    alone, would pass for the model.
    """
    for name in ("_get_model_state_dict", "_get_optim_state_dict"):
        setattr(torch_state_dict, name, _gathering(getattr(torch_state_dict, name)))
    load = "_load_optim_state_dict"
    setattr(torch_state_dict, load, _taking_whole(getattr(torch_state_dict, load)))


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get(model: Any, *others: Any) -> Any:
        *between, info = others
        if not (info.full_state_dict and isinstance(model, ParallelModel) and _many()):
            return original(model, *others)
        own = original(model, *between, replace(info, full_state_dict=False, cpu_offload=False))
        with call("get_state_dict(full_state_dict=True)"):
            device = model._own("_steps").device
            return gathered(own, device, on_cpu_of_rank_0=info.cpu_offload)

    return get


def _taking_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load(model: Any, optimizers: Any, state_dict: Any, info: Any) -> None:
        if isinstance(model, ParallelModel) and not info.broadcast_from_rank0:
            info = replace(info, full_state_dict=False)  # `load_state_dict` takes its parts of it
        original(model, optimizers, state_dict, info)

    return load


def _many() -> bool:
    return dist.is_initialized() and dist.get_world_size(all_ranks()) > 1


def gathered(
    own: Mapping[str, Any], device: torch.device, *, on_cpu_of_rank_0: bool
) -> dict[str, Any]:
    """The state dict with all that any rank has of it, in whole tensors on every rank's device; or
    on the CPU of rank 0, and {} elsewhere. Collective; holds one tensor more than it gives.
    """
    keeps = not on_cpu_of_rank_0 or dist.get_rank(all_ranks()) == 0
    found: dict[str, Any] = {}
    for path, leaf in wholes(own, device):
        if on_cpu_of_rank_0 and isinstance(leaf, torch.Tensor):
            leaf = leaf.cpu()
        if keeps:
            put(found, path, leaf)
    return found


def wholes(own: Mapping[str, Any], device: torch.device) -> Iterator[tuple[Path, Any]]:
    """The leaves of a state dict that ranks hold parts of, whole, one after the other, with where
    they lie: on every rank's device, and there is no second one. Collective.
    """
    leaves = dict(leaves_of(own, ()))
    if not _many():
        yield from leaves.items()
        return
    group = all_ranks()
    everyone: list[dict[Path, _Said]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, {path: _said(leaf) for path, leaf in leaves.items()}, group)
    for path in dict.fromkeys(path for said in everyone for path in said):
        said = {rank: every[path] for rank, every in enumerate(everyone) if path in every}
        yield path, _whole(leaves.get(path), said, device)


def leaves_of(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """The values of nested dicts and lists by where they lie; those that are empty themselves."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves_of(inner, (*path, key))
    elif isinstance(value, list) and value:
        for k, inner in enumerate(value):
            yield from leaves_of(inner, (*path, _Index(k)))
    else:
        yield path, value


def put(found: Any, path: Path, leaf: Any) -> None:
    """Puts a leaf where it lies, and the dicts and lists on the way there."""
    for key, following in pairwise(path):
        _set(found, key, [] if isinstance(following, _Index) else {})
        found = found[key]
    _set(found, path[-1], leaf)


def _set(found: Any, key: Any, value: Any) -> None:
    """Sets what is not there yet."""
    if isinstance(found, list):
        found += [value] * (len(found) == key)
    else:
        found.setdefault(key, value)


def _said(leaf: Any) -> _Said:
    if not isinstance(leaf, torch.Tensor):
        return _Said(leaf)
    place = leaf.place if isinstance(leaf, TensorPart) else None
    return _Said(shape=leaf.shape, dtype=leaf.dtype, place=place)


def _whole(own: Any, said: Mapping[int, _Said], device: torch.device) -> Any:
    """One leaf: of the first rank that has all of it, or put together from the ranks' parts."""
    first, one = next(((r, s) for r, s in said.items() if s.place is None), min(said.items()))
    if one.shape is None:
        return one.value
    group = all_ranks()
    me = dist.get_rank(group)
    whole = torch.empty(one.shape, dtype=one.dtype, device=device)
    if one.place is None:
        whole = own.to(device).contiguous() if first == me else whole
        dist.broadcast(whole, first, group)
        return whole
    for rank, place in ((r, s.place) for r, s in said.items()):
        assert place is not None
        if not place.writes:
            continue
        part = own.local.to(device).contiguous() if rank == me else whole.new_empty(place.numel)
        dist.broadcast(part, rank, group)
        for box in place.boxes:
            whole[box.slices] = place.view(part, box)
    return whole

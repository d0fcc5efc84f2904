"""Batches that only some ranks of a data-parallel replica are given, and lend to the others.

Every rank needs its replica's batch: its shapes decide which step runs. A rank that was given None
gets what the first rank has that was given something in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from merakc.errors import MismatchError
from merakc.frontend.values.structures import open_dataclasses
from merakc.runtime.groups import Groups
from merakc.runtime.health.job import call

Batch = tuple[tuple[Any, ...], dict[str, Any]]


class _Like:
    """A tensor that follows; no dataclass, whose fields would be parts of the batch."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


class Lent:
    """Lends the arguments of calls within a replica, if any rank misses some at the first call:
    later ones, then, cost two small messages more, and all others nothing.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.lends: bool | None = None

    def filled(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """The arguments of a call, with others' in the place of None; every rank must call it.

        Raises `MismatchError` where no rank of the replica was given a batch and others were.
        """
        group = self.groups.axis("model")
        if group is None or self.lends is False:
            return tuple(args), dict(kwargs)
        open_dataclasses((args, kwargs))
        own: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        own = own if any(value is not None for value in own.values()) else {}
        with call(f"the batch of {name}"), torch.inference_mode(mode=False):
            everyone: list[dict[Any, bool]] = [{} for _ in range(group.size())]
            told = {key: value is not None for key, value in own.items()}
            dist.all_gather_object(everyone, told, group=group)
            keys = dict.fromkeys(key for of in everyone for key in of)
            lenders = {k: [r for r, of in enumerate(everyone) if of.get(k)] for k in keys}
            lent = {k: ranks[0] for k, ranks in lenders.items() if 0 < len(ranks) < len(everyone)}
            if self.lends is None:
                self.lends = bool(lent)
            elif not keys:
                ranks = dist.get_process_group_ranks(group)
                raise MismatchError(
                    f"none of ranks {ranks}, one data-parallel replica, was given a batch for "
                    f"{name}: at least one of them must be, the others may be given None"
                )
            if not lent:
                return tuple(args), dict(kwargs)
            taken = {k: _lend(own.get(k), r, group, self.groups.device) for k, r in lent.items()}
        found = {k: taken[k] if own.get(k) is None and k in lent else own.get(k) for k in keys}
        places = sorted(k for k in keys if isinstance(k, int))
        return tuple(found.pop(k) for k in places), found


def _lend(value: Any, lender: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """A value that one rank of the group has; collective. Its tensors are on the device."""
    source, is_lender = dist.get_global_rank(group, lender), dist.get_rank(group) == lender
    box = [pytree.tree_map_only(torch.Tensor, _Like, value) if is_lender else None]
    dist.broadcast_object_list(box, source, group=group)
    tensors = iter(x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))

    def moved(like: _Like) -> torch.Tensor:
        if is_lender:
            tensor = next(tensors).detach().to(device).contiguous()
        else:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
        dist.broadcast(tensor.view(-1).view(torch.uint8), source, group=group)
        return tensor

    open_dataclasses(box[0])
    return pytree.tree_map_only(_Like, moved, box[0])

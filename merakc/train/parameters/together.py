"""Optimizers that update all parameters together, on ranks that hold parts or some of them.

LBFGS goes by products of vectors of all elements, others by a norm of all gradients. Within a step
of one of them every rank has all parameters and gradients whole, and does what one process does,
in as much memory. That all ranks find the same values is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from merakc.errors import MismatchError
from merakc.runtime.groups import from_rank_0, together
from merakc.runtime.health.job import all_ranks, call
from merakc.runtime.part import local_of, plain
from merakc.runtime.state import digest, gather_full
from merakc.train.parameters.matrices import CALL, Bringing
from merakc.train.parameters.norms import Owners
from merakc.train.told import warn_of_line

Tensors = dict[str, torch.Tensor]


class Together(Bringing):
    """Gives an optimizer all its tensors whole in its steps, on every rank."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        every = (p for group in optimizer.param_groups for p in group["params"])
        self.models: dict[Owners, dict[str, Any]] = {}
        for p in every:
            if hasattr(p, "source"):
                self.models.setdefault(p.source.owners, {})[p.source.name] = p
                self.others[p] = nn.Parameter(plain(p).detach().new_empty(0))
        count = sum(p.source.numel for named in self.models.values() for p in named.values())
        kind = type(optimizer).__name__
        if not dist.is_initialized() or dist.get_rank() == 0:
            warn_of_line(
                f"{kind} updates all parameters together: every rank holds all {count} elements, "
                f"their gradients and what {kind} keeps of them, whole, as one process does"
            )

    @property
    def updates(self) -> dict[torch.Tensor, bool]:
        """The parameters that it updates whole; whether this rank does."""
        return dict.fromkeys(self.others, True)

    @torch.no_grad()
    def bring(self) -> None:
        """Gives it all values and gradients of the models."""
        with call(CALL):
            for owners, named in self.models.items():
                values = _everywhere(owners, {n: plain(p) for n, p in named.items()})
                given = {n: plain(p.grad) for n, p in named.items() if p.grad is not None}
                gradients = _everywhere(owners, given)
                for name, p in named.items():
                    other = self.others[p]
                    assert other is not None
                    other.data, other.grad = values[name], gradients.get(name)

    @torch.no_grad()
    def send_back(self) -> None:
        """Puts this rank's parts of what it has found into the parameters.

        Raises `MismatchError` where ranks have found other values.
        """
        for owners, named in self.models.items():
            held = [p for p in named.values() if p.source.name in owners.held]
            for p in held:
                plain(p).copy_(local_of(p, self.others[p].detach()))  # type: ignore[union-attr]
        with call(CALL):
            found = together(lambda: digest(p for p in self.others.values() if p is not None))
        if len({*found}) > 1:
            raise MismatchError(
                "an optimizer that updates all parameters together has found other values on some "
                "ranks than on others: where it draws random numbers, give all ranks one seed"
            )


def _everywhere(owners: Owners, own: Mapping[str, torch.Tensor]) -> Tensors:
    """Whole tensors, on every rank, of all ranks' parts of them; collective."""
    local = {n: t for n, t in own.items() if n in owners.held}
    sharded = owners.sharded()
    parts = list(sharded.wholes(local)) if sharded else []
    mesh, rank = owners.groups.mesh, owners.groups.rank
    found = gather_full(local, parts, owners.placements, mesh, rank)
    for name in from_rank_0(lambda: list(found)):
        place = owners.placements[name]
        like = torch.empty(place.layout.shape, dtype=place.dtype, device=owners.device)
        whole = like.copy_(found[name]) if rank == 0 else like
        dist.broadcast(whole, 0, group=all_ranks())
        found[name] = whole
    return found

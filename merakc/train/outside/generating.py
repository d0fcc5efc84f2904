"""What surrounds `generate`: the ranks that go on with one text draw the same of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from merakc.runtime.groups import Groups
from merakc.runtime.health.job import call

State = torch.Tensor
# How the state of a generator of random numbers is read, and set.
Generator = tuple[Callable[[], State], Callable[[State], None]]


@contextmanager
def drawing_alike(groups: Groups, axis: str) -> Iterator[None]:
    """Has the ranks along an axis draw as the first of them does, which goes on from there; others
    are put back to where they were, unless they had been there too. Collective.
    """
    group = groups.axis(axis)
    if group is None:
        yield
        return
    first, found = dist.get_process_group_ranks(group)[0], list[tuple[Generator, State]]()
    with call("model.generate(...)"):
        for read, put in _generators(groups.device):
            own = read()
            state = own.to(groups.device, copy=True)
            dist.broadcast(state, first, group=group)
            if not torch.equal(state := state.cpu(), own):
                put(state)
                found.append(((read, put), own))
    try:
        yield
    finally:
        for (_, put), own in found:
            put(own)


def _generators(device: torch.device) -> Sequence[Generator]:
    cpu: Generator = torch.get_rng_state, torch.set_rng_state
    if device.type != "cuda":
        return (cpu,)
    cuda = torch.cuda
    return cpu, (lambda: cuda.get_rng_state(device), lambda x: cuda.set_rng_state(x, device))

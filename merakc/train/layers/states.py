"""Optimizers whose parameters are replaced, with the state that they have of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from merakc.errors import ConfigError
from merakc.runtime.groups import together
from merakc.runtime.part import local_of, place_of
from merakc.train.checkpoints.full_state import leaves_of, put, wholes
from merakc.train.parameters.matrices import with_wrapped
from merakc.train.parameters.optimizers import check, forget, is_by_parameter, updated_whole
from merakc.train.parameters.places import elsewhere
from merakc.train.parameters.states import tagged_state


class State:
    """What optimizers hold of a model's parameters, of these names, to be moved to others.

    Raises `ConfigError` for optimizers whose state belongs to no parameter by itself.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str]) -> None:
        self.optimizers, self.names = optimizers, names
        self.own: dict[str, dict[str, Any]] = {}
        for k, optimizer in enumerate(optimizers):
            if not is_by_parameter(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} updates parameters together, or cannot be tried "
                    "on small ones, so that what it keeps of each is not known: leave it out, and "
                    "make it anew"
                )
            check(optimizer)
            updated_whole(optimizer)  # its own lists of parameters are in place then
            of = self.own[str(k)] = {}
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                state = optimizer.state.get(p, {}) if p in names and p not in elsewhere else {}
                if found := tagged_state(optimizer, p, state):
                    of[names[p]] = found

    def move(
        self, now: Mapping[str, nn.Parameter], origin: Mapping[str, str], undo: ExitStack
    ) -> None:
        """Has the optimizers hold the parameters that there are now, each with a copy of the state
        of the one that it comes from. One tensor at a time is whole on a rank. Collective.
        """
        targets: dict[str, list[str]] = {}
        for name in now:
            targets.setdefault(origin[name], []).append(name)
        order: dict[torch.Tensor, int] = {p: k for k, p in enumerate(now.values())}
        for optimizer in self.optimizers:
            self._exchange(optimizer, now, targets, order, undo)
        on_cpu = self._on_cpu()
        for path, leaf in wholes(self.own, next(iter(now.values())).device):
            if len(path) <= 2:  # of an optimizer without state
                continue
            k, name, *inside = path
            optimizer = self.optimizers[int(k)]
            whole = updated_whole(optimizer)
            for target in targets.get(name, ()):
                p = now[target]
                if p not in elsewhere and whole.get(p, True):
                    value = _taken(p, leaf, target, is_whole=p in whole)
                    value = value.cpu() if path in on_cpu else value
                    put(optimizer.state, (p, *inside), value)

    def _exchange(
        self,
        optimizer: Optimizer,
        now: Mapping[str, nn.Parameter],
        targets: Mapping[str, Sequence[str]],
        order: Mapping[torch.Tensor, int],
        undo: ExitStack,
    ) -> None:
        """Puts the parameters into an optimizer's lists, and what it wraps has, without state."""
        every = with_wrapped(optimizer)
        known = {p: [now[n] for n in targets.get(name, ())] for p, name in self.names.items()}
        named = {p: name for name, p in now.items()}
        groups = [group for one in every for group in one.param_groups]
        for group in {id(group["params"]): group for group in groups}.values():
            before, given = [*group["params"]], group.get("param_names")
            own = dict(zip(before, given or (), strict=bool(given)))
            found = [q for p in before for q in known.get(p, [p])]
            found.sort(key=lambda q: order.get(q, len(order)))
            undo.callback(group["params"].__setitem__, slice(None), before)
            group["params"][:] = found
            if given:
                undo.callback(group["param_names"].__setitem__, slice(None), [*given])
                group["param_names"][:] = [named.get(q) or own[q] for q in found]
        for state in {id(one.state): one.state for one in every}.values():
            undo.callback(state.update, dict(state))
            undo.callback(state.clear)
            for p in known:
                state.pop(p, None)
        undo.callback(forget, optimizer)
        forget(optimizer)
        check(optimizer)

    def _on_cpu(self) -> set[tuple[Any, ...]]:
        """The tensors that are kept there, as counts of steps are."""
        leaves = [(path, x) for path, x in leaves_of(self.own, ()) if isinstance(x, torch.Tensor)]
        own = {path for path, leaf in leaves if leaf.device.type == "cpu"}
        return set().union(*together(lambda: own))


def _taken(p: torch.Tensor, leaf: Any, name: str, *, is_whole: bool) -> Any:
    """What a rank keeps of a parameter's state, in memory of its own."""
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    place = place_of(p)
    if place is not None and not is_whole and leaf.dim():
        if tuple(leaf.shape) != place.shape:
            raise ConfigError(
                f"the optimizer's state of '{name}' is {tuple(leaf.shape)}, not as the parameter, "
                f"{place.shape}, of which a rank holds a part by the new plan: give a plan that "
                "leaves parameters whole (tp=1, state_shards='zero-0')"
            )
        leaf = local_of(p, leaf)
    return leaf.detach().clone()

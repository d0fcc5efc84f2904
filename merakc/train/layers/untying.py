"""Layers that share parameters get their own in the middle of a run, under a plan of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from merakc.errors import ConfigError
from merakc.frontend.record import aliases_of
from merakc.ir.boxes import Box
from merakc.runtime.groups import agree
from merakc.runtime.health.job import call
from merakc.runtime.part import tagged
from merakc.train.checkpoints.full_state import wholes
from merakc.train.checkpoints.run_state import listed, names_of, parallel_state, resume
from merakc.train.layers.sharing import (
    KEY,
    Named,
    Sharing,
    owner,
    parameter_at,
    shared_layers,
    told,
)
from merakc.train.layers.states import State
from merakc.train.model import ParallelModel
from merakc.train.parameters.parts import rows_of
from merakc.train.parameters.retired import check_idle, retire
from merakc.train.weights import check_has_weights

WHAT = "untie_layers"


def untie_layers(
    model: nn.Module, optimizer: Any = None, *, layers: Named = None, **options: Any
) -> tuple[Sharing, ...]:
    """Gives layers that share parameters their own, with the optimizer's state of them; says which.

    Values, moments and counts of steps are copied to each layer, and training goes on with the same
    model and optimizer objects, schedulers among what refers to these. A parallel model is given a
    new plan, for the arguments that `auto_parallel` had, and as many dp ranks as before, whose data
    stay theirs. Parameters from before are refused where something still uses them. Every rank must
    call it, between two steps.

    Args:
        model: a model of `auto_parallel`, or a plain one in one process; it is changed in place.
        optimizer: one or several that train it, whose state belongs to single parameters.
        layers: as of `share_layers`; those that it let share parameters if None.
        **options: arguments of `auto_parallel` in the place of those that it had: `batch`, degrees,
            `plan`. A `ledger` is begun only where one is given here.

    Raises `ConfigError` where nothing is shared, where gradients are there, and for optimizers that
    update all parameters together; `FitError` and its like where no plan is found. Nothing is
    changed then.
    """
    with call(f"merakc.{WHAT}"), ExitStack() as undo:
        is_parallel = isinstance(model, ParallelModel)
        steps = model._own("_steps") if isinstance(model, ParallelModel) else None
        source = steps.source if steps is not None else model
        if not is_parallel:
            _check_alone(model, options)
        shared = tuple(shared_layers(source, layers))
        own = {n: p for n, p in model.named_parameters() if is_parallel or _is_of(n, shared, model)}
        for name, p in own.items():
            check_idle(name, p, WHAT, own_hooks=int(is_parallel and hasattr(p, "source")))
        state = State(listed(optimizer), names_of(model))
        before = _first_names(source)
        _untie(source, shared, undo)
        origin = {name: before[name] for name in _first_names(source).values()}
        agree(lambda: {WHAT: f"{shared}, {sorted(options)}"})
        if isinstance(model, ParallelModel):
            _begin_again(model, source, origin, options, undo)
        now = dict(model.named_parameters())
        state.move(now, origin, undo)
        undo.pop_all()
        if steps is not None:
            steps.agreement.close()  # nothing looks at the optimizer for it any more
            steps.compiled.clear()
        for name, p in own.items():
            if p is not now.get(name):
                retire(p, told(name, WHAT))
    return shared


def _check_alone(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a plain model on several ranks, whose wrappers know its parameters,
    and one that `auto_parallel` took the weights of.
    """
    check_has_weights(model)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"{WHAT} is called on a plain {type(model).__name__} in a job of several ranks, where "
            "what reduces its gradients would not know of new parameters: give it what "
            "auto_parallel returned, or untie the layers in one process"
        )
    if options:
        raise ConfigError(
            f"{', '.join(options)}: options are auto_parallel's, and this {type(model).__name__} "
            "is a plain model; leave them out"
        )


def _first_names(model: nn.Module) -> dict[str, str]:
    """Of every name of a parameter or buffer, the first name of the same."""
    names = [n for n, _ in (*model.named_parameters(), *model.named_buffers())]
    return {name: name for name in names} | aliases_of(model)


def _is_of(name: str, shared: Sequence[Sharing], model: nn.Module) -> bool:
    """Whether a plain model's parameter is one that layers share."""
    own = model.get_parameter(name)
    return any(own is parameter_at(model, s.layers[0], n) for s in shared for n in s.names)


def _untie(model: nn.Module, shared: Sequence[Sharing], undo: ExitStack) -> None:
    """Gives each layer parameters of its own; ties inside of a layer stay."""
    for module in model.modules():
        if KEY in vars(module):
            undo.callback(setattr, module, KEY, vars(module)[KEY])
            delattr(module, KEY)
    for one in shared:
        for layer in one.layers:
            own: dict[int, nn.Parameter] = {}
            for name in one.names:
                module, leaf = owner(model, layer, name)
                old = parameter_at(model, layer, name)
                if id(old) not in own:
                    made = own[id(old)] = _copied(old)
                    own[id(made)] = made  # met again where one module has two names
                undo.callback(module._parameters.__setitem__, leaf, old)
                module._parameters[leaf] = own[id(old)]


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    """Another parameter of the same values and attributes."""
    made = type(parameter)(
        parameter.data.clone(memory_format=torch.preserve_format), parameter.requires_grad
    )
    vars(made).update(vars(parameter))
    return made


@dataclass(frozen=True)
class Held:
    """The weights of a model on its ranks, which another plan of a model takes: `origin` says of
    every tensor of that under which name this one has it.
    """

    own: Mapping[str, torch.Tensor]
    origin: Mapping[str, str]
    device: torch.device

    @property
    def tensors(self) -> Mapping[str, str]:
        """What there is."""
        return self.origin

    @property
    def fingerprint(self) -> str:
        """That of no files."""
        return "those of the model"

    def check(self, share: int, of: int) -> None:
        """Nothing: they are where they were."""

    def read(self) -> Iterator[tuple[str, Callable[[Box], Iterator[torch.Tensor]]]]:
        """One after the other, each whole while it is read; collective."""
        for (name,), whole in wholes(self.own, self.device):
            for target in (n for n, of in self.origin.items() if of == name):
                yield target, lambda box, whole=whole: rows_of(whole, box)  # type: ignore[misc]


def _begin_again(
    model: ParallelModel,
    source: nn.Module,
    origin: Mapping[str, str],
    options: Mapping[str, Any],
    undo: ExitStack,
) -> None:
    """Gives a model a new plan, for its source as that is now, and its own weights again."""
    steps = model._own("_steps")
    model._own("_memory").settle()
    held = Held({n: tagged(t) for n, t in steps.state.items()}, origin, steps.device)
    asks = {n: p.requires_grad for n, p in model.named_parameters()}
    saved, modes = parallel_state(model), {m: m.training for m in source.modules()}
    made = model._own("_again")(source, steps.planned.plan, held, options)
    undo.callback(_put_back, [(part, dict(vars(part))) for part in model.modules()])
    model._run_by(*made)
    for name, p in model.named_parameters():
        p.requires_grad_(asks[origin[name]])
    for module, mode in modes.items():
        module.training = mode
    model._own("_steps").wanted = steps.wanted
    resume(model, saved)


def _put_back(held: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Has modules hold what they held."""
    for part, own in held:
        vars(part).clear()
        vars(part).update(own)

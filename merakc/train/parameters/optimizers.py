"""What an optimizer may update of what a rank holds of a model.

A rank's parts are updated as the whole would be where every element is updated from its own
gradient and state alone. Where every parameter is, by its own alone, each is brought to one rank
for the step (`matrices.py`), otherwise all are brought to every rank (`together.py`). Which it is
is tried before an optimizer's first step, not looked up: a copy of it updates small parameters, of
as many dims as its own, and other copies update parts of them.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from merakc.errors import ConfigError, failure
from merakc.runtime.agreement import settings_of
from merakc.runtime.part import place_of
from merakc.train.parameters.matrices import (
    Bringing,
    Home,
    Others,
    WholeTensors,
    exchange,
    exchange_back,
)
from merakc.train.parameters.places import check_reach, elsewhere
from merakc.train.parameters.stepping import is_stepping
from merakc.train.parameters.together import Together

STEPS = 12  # some begin with plain steps, or with none
RATE = 0.1  # at which examples change by much more than rounding
# The second has more elements than optimizers that keep 8 bits leave in 32: 4,096.
SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((), ()), 1: ((24,), (10,)), 2: ((8, 6), (96, 80), (4, 12)),
}  # fmt: skip
# Of values of the size of one: float64's rounding, and float32's, which some optimizers need.
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}
_NOT_COPIED = ("param_groups", "state", "step")  # what is not of what decides its steps
holdings = WeakIdKeyDictionary()  # what ranks hold of living models, by parameter
_left: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters that models had before, and names
_tried: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # with how many parameter groups
_declared: set[type[Optimizer]] = set()
bringing: WeakKeyDictionary[Optimizer, Bringing] = WeakKeyDictionary()  # to those that need it
Values = list[list[torch.Tensor]]  # by parameter group
_Target = tuple[nn.Parameter, torch.Tensor, list[torch.Tensor]]  # its value behind, its gradients
View = Callable[[int, torch.Tensor], torch.Tensor | None]  # of the k-th parameter, on one rank


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank has of a parameter: part of it or all; and whether others are elsewhere."""

    name: str
    is_part: bool
    are_some: bool
    home: Home


def hold(parameters: Mapping[str, torch.Tensor], home: Home) -> None:
    """Remembers a rank's parameters. Of a pipeline other ranks hold other ones."""
    for name, parameter in parameters.items():
        is_part = place_of(parameter) is not None
        holdings[parameter] = Held(name, is_part, is_part or home.groups.mesh.pp > 1, home)
    _watch()


def leave(model: nn.Module) -> None:
    """Remembers the parameters that a model has before its weights are taken over."""
    for name, parameter in model.named_parameters():
        _left[parameter] = name
    _watch()


def declare_elementwise(kind: type[Optimizer]) -> None:
    """Takes your word that optimizers of a class update every element from its own gradient and
    state alone: for those that cannot be tried on small parameters.
    """
    _declared.add(kind)


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(lambda optimizer, *_: check(optimizer))


def check(optimizer: Optimizer) -> None:
    """Raises `ConfigError` for an optimizer of parameters that no step reads any more, and for one
    that would train some of the parameters otherwise than the whole model; gives whole tensors to
    one that needs them.
    """
    if is_stepping():  # one that it wraps, or its class's base
        return
    if optimizer in bringing:
        bringing[optimizer].ready(optimizer)
    if _tried.get(optimizer) == len(optimizer.param_groups):
        return
    groups = [[p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]
    for p in (p for group in groups for p in group):
        if p in _left:
            raise ConfigError(
                f"this {type(optimizer).__name__} holds '{_left[p]}' as it was before "
                "auto_parallel, which took the weights over: no step trains that; make the "
                "optimizer behind auto_parallel, of the model that it returns"
            )
    held = [holdings[p] for group in groups for p in group if p in holdings]
    forget(optimizer)
    is_asked = any(h.are_some for h in held) or any(p in elsewhere for g in groups for p in g)
    if is_asked and type(optimizer) not in _declared:
        needed = _needed(optimizer, groups, held)
        check_reach(type(optimizer).__name__, {h.name: h.home.sharded() for h in held if needed})
        if needed is WholeTensors:
            homes = {p: holdings[p].home for group in groups for p in group if p in holdings}
            bringing[optimizer] = WholeTensors(optimizer, homes)
        elif needed is Together:
            bringing[optimizer] = Together(optimizer)
    _tried[optimizer] = len(optimizer.param_groups)


def forget(optimizer: Optimizer) -> None:
    """Tries an optimizer, whose parameters are replaced, anew before its next step."""
    _tried.pop(optimizer, None)
    if optimizer in bringing:
        bringing.pop(optimizer).close()


def is_by_parameter(optimizer: Optimizer) -> bool:
    """Whether it keeps of each parameter what is of that alone, as far as can be tried."""
    groups = [[p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]
    found = type(optimizer) in _declared
    with suppress(Exception):
        found = found or _difference(optimizer, groups, (_BY_PARAMETER,), twins=True) is None
    return found


def updated_whole(optimizer: Optimizer) -> dict[torch.Tensor, bool]:
    """The parameters that ranks hold parts of, and that the optimizer updates whole; whether this
    rank does.
    """
    brought = bringing.get(optimizer)
    if brought is None:
        return {}
    brought.restore(optimizer)
    return brought.updates


def is_together(optimizer: Optimizer) -> bool:
    """Whether it updates all parameters together, so that every rank has all of its state."""
    return isinstance(bringing.get(optimizer), Together)


def _needed(
    optimizer: Optimizer, groups: Sequence[Sequence[torch.Tensor]], held: list[Held]
) -> type[Bringing] | None:
    """What brings it what it needs; None where it updates every element by itself."""
    kind = type(optimizer).__name__
    part = next((h.name for h in held if h.is_part), None)
    where = f"a part of '{part}'" if part else "some of the parameters"
    told = (
        f"this plan leaves a rank {where}, and what it needs of the others cannot be known; use "
        f"one that updates every element by itself, such as AdamW, or a plan that leaves every "
        "rank the whole model (tp=1, state_shards='zero-0', pp=1)"
    )
    try:
        if _difference(optimizer, groups, _IN_PARTS) is None:
            return None
        if _difference(optimizer, groups, (_BY_PARAMETER,), twins=True) is None:
            return WholeTensors
        difference = _difference(optimizer, groups, (_ALL,), twins=True)
    except Exception as error:
        raise ConfigError(
            f"whether {kind} can update parts could not be tried ({failure(error)}): {told}; or, "
            f"if it updates every element by itself, say so by merakc.declare_elementwise({kind})"
        ) from error
    if difference is not None:
        by = f", by {difference:.1e} after {STEPS} steps" if math.isfinite(difference) else ""
        raise ConfigError(
            f"{kind} updates small parameters otherwise when they are given to it for a step{by}: "
            f"{told}"
        )
    return Together


def _difference(
    optimizer: Optimizer,
    groups: Sequence[Sequence[torch.Tensor]],
    ways: Iterable[Sequence[View]],
    *,
    twins: bool = False,
) -> float | None:
    """How far parts come from what is updated whole, where that is beyond rounding; infinity where
    the optimizer does not take parts.
    """
    for dtype, bound in BOUNDS.items():
        values, gradients = examples(groups, dtype)
        try:
            whole, told = _updated(optimizer, values, gradients, [lambda _, t: t])
        except Exception:
            if dtype == torch.float32:
                raise
            continue
        _check_moved(values, whole, 1e3 * bound)
        for way in ways:
            try:
                parts, own = _updated(optimizer, values, gradients, way, twins=twins)
            except Exception:
                return math.inf
            if own != told:  # it adapts what it goes by to what it sees
                return math.inf
            pairs = zip(chain(*whole), chain(*parts), strict=True)
            found = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
            if not found <= bound:  # nor where it is no number
                return found
        return None
    raise AssertionError("the last dtype raises")


def _check_moved(before: Values, after: Values, least: float) -> None:
    """Raises `ValueError` for a trial that would show nothing."""
    for k, (group, moved) in enumerate(zip(before, after, strict=True)):
        moves = (float((a - b).abs().max()) for a, b in zip(group, moved, strict=True))
        if group and not max(moves) >= least:
            raise ValueError(f"in {STEPS} steps it hardly changes small parameters of group {k}")


def examples(
    groups: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype
) -> tuple[Values, list[Values]]:
    """Small parameters for each group, of its numbers of dims, and gradients for each step; their
    elements differ in size, as do norms of parts then.
    """
    made = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        scales = torch.linspace(0.1, 2.0, max(1, torch.Size(shape).numel()), dtype=torch.float64)
        value = torch.randn(shape, generator=made, dtype=torch.float64) * scales.view(shape)
        return value.to(device, dtype)

    shapes = []
    for group in groups:
        dims = sorted({p.dim() for p in group})
        device = group[0].device if group else torch.device("cpu")
        every = [s for n in dims for s in SHAPES.get(n, ((6, 4, *(2,) * (n - 2)),) * 2)]
        shapes.append([(shape, device) for shape in every])
    values = [[drawn(*at) for at in group] for group in shapes]
    return values, [[[drawn(*at) for at in group] for group in shapes] for _ in range(STEPS)]


def _updated(
    optimizer: Optimizer,
    values: Values,
    gradients: Sequence[Values],
    ranks: Sequence[View],
    *,
    twins: bool = False,
) -> tuple[Values, set[str]]:
    """The values after the steps, each rank's view of them updated by a copy of its own; with
    `twins`, given others for its parameters in every step, as `WholeTensors` does. And the settings
    that the copies have then.
    """
    settings = set()
    after = [[v.clone() for v in group] for group in values]
    numbers = iter(range(sum(map(len, values))))
    order = [[next(numbers) for _ in group] for group in values]
    for view in ranks:
        own: list[list[nn.Parameter]] = []
        targets: list[_Target] = []
        for g, group in enumerate(after):
            own.append([])
            for k, value in enumerate(group):
                target = view(order[g][k], value)
                if target is None:
                    continue
                parameter = nn.Parameter(target.clone())
                given = (view(order[g][k], step[g][k]) for step in gradients)
                targets.append((parameter, target, [t for t in given if t is not None]))
                own[-1].append(parameter)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            taken = copied(optimizer, own)
            quicken(taken)
            for step in range(STEPS):
                others: dict[torch.Tensor, nn.Parameter | None] = {}
                for parameter, _, own_gradients in targets:
                    other = nn.Parameter(parameter.detach().clone()) if twins else parameter
                    other.grad, others[parameter] = own_gradients[step].clone(), other
                lists = exchange(taken, others)
                _take_step(taken, partial(_loss, targets, others, step))
                exchange_back(taken, others, lists)
                for parameter, *_ in targets:
                    parameter.data = others[parameter].data  # type: ignore[union-attr]
        settings.add(settings_of(taken))
        for parameter, target, _ in targets:
            target.copy_(parameter.detach())
    return after, settings


def quicken(optimizer: Optimizer) -> None:
    """Sets rates by which differences show: a schedule may begin at none."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            rate.fill_(RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = RATE


def _loss(targets: Sequence[_Target], others: Others, step: int) -> torch.Tensor:
    """A quadratic loss, whose gradients it accumulates."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter, _, gradients in targets:
        now = others[parameter]
        assert now is not None
        own = now.detach()
        now.grad = own + gradients[step]
        total += (own * (own / 2 + gradients[step])).sum().cpu()
    return total


def _take_step(optimizer: Optimizer, closure: Callable[[], Any]) -> None:
    try:
        optimizer.step()
    except TypeError:  # it asks for a closure
        optimizer.step(closure)


def copied(
    optimizer: Optimizer,
    parameters: Sequence[Sequence[nn.Parameter]],
    memo: dict[int, Any] | None = None,
) -> Optimizer:
    """An optimizer of the same settings for other parameters, as before its first step.

    Whatever it refers to is copied, with others in place of its own parameters: nothing that it
    does reaches them. An optimizer that it wraps becomes one for the same other parameters.
    """
    memo = {} if memo is None else memo
    made = object.__new__(type(optimizer))
    made.state = memo.setdefault(id(optimizer.state), defaultdict(dict))
    made.param_groups = memo.setdefault(id(optimizer.param_groups), [])
    if not made.param_groups:
        for group, own in zip(optimizer.param_groups, parameters, strict=True):
            stand_ins = own or [nn.Parameter(torch.zeros(0))]
            now = memo[id(group["params"])] = [*own]
            memo |= {id(p): stand_ins[k % len(stand_ins)] for k, p in enumerate(group["params"])}
            options = {k: v for k, v in group.items() if k != "params"}
            if id(group) not in memo:
                memo[id(group)] = copy.deepcopy(options, memo) | {"params": now}
            made.param_groups.append(memo[id(group)])
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            made.__dict__[key] = OrderedDict()
        elif isinstance(value, Optimizer):
            made.__dict__[key] = copied(value, parameters, memo)
        elif key not in _NOT_COPIED:
            made.__dict__[key] = copy.deepcopy(value, memo)
    return made


def _along(dim: int, rank: int) -> View:
    def view(_: int, tensor: torch.Tensor) -> torch.Tensor | None:
        if not tensor.dim():
            return tensor if rank == 0 else None
        return tensor.tensor_split(2, dim)[rank]

    return view


def _flat(rank: int) -> View:
    """As buckets are cut: a piece of the elements in order, of as many dims as the whole."""

    def view(_: int, tensor: torch.Tensor) -> torch.Tensor | None:
        if not tensor.dim():
            return tensor if rank == 0 else None
        piece = tensor.view(-1).tensor_split([tensor.numel() // 3])[rank]
        return piece.view((1,) * (tensor.dim() - 1) + (piece.numel(),))

    return view


_IN_PARTS: tuple[Sequence[View], ...] = (
    (_along(0, 0), _along(0, 1)), (_along(-1, 0), _along(-1, 1)), (_flat(0), _flat(1)),
)  # fmt: skip
_ALL: Sequence[View] = (lambda _, t: t,)
_BY_PARAMETER: Sequence[View] = (
    lambda k, t: t if k % 2 == 0 else None,
    lambda k, t: t if k % 2 else None,
)

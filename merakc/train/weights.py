"""A model's weights: initialised, found their places under a plan, and moved to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakSet

import torch
from torch import nn

from merakc.analysis.buckets import Held, parameters_in_order, plan_buckets
from merakc.errors import ConfigError
from merakc.ir.graph import InputKind, OutputKind, Ref
from merakc.ir.layout import DimFactor, Layout, parse_layout
from merakc.ir.precision import kept_dtype
from merakc.lowering.lowered import Lowered
from merakc.runtime.groups import Groups
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.shards import ShardGroups
from merakc.runtime.state import Placement, same_everywhere

Tensors = dict[str, torch.Tensor]
# Modules whose weights were taken over: what is on the meta device there was never meant to be.
_emptied: WeakSet[nn.Module] = WeakSet()
STATE = (InputKind.PARAMETER, InputKind.BUFFER)


def find_placements(model: nn.Module, lowered: Lowered) -> dict[str, Placement]:
    """Where every parameter and buffer of the model lives, by its first name.

    What training does not read is on the stage of its module's other tensors, or on the last;
    what is read before the step is on all stages.
    """
    graph, stages, sharding = lowered.loss.graph, lowered.stages.graphs, lowered.stages.sharding
    known = lowered.loss.known
    everywhere = {i.target for i in known.part.inputs} if known else set()
    refs = {o.name: o.ref for o in graph.outputs if o.kind is OutputKind.BUFFER}
    refs |= {i.target: Ref(i.name) for i in graph.inputs if i.kind in STATE}
    holders: dict[str, set[int]] = {}
    for stage, part in enumerate(stages):
        read = [i.target for i in part.inputs if i.kind in STATE]
        written = [o.name for o in part.outputs if o.kind is OutputKind.BUFFER]
        for name in (*read, *written):
            holders.setdefault(name, set()).add(stage)
    homes = {name.rpartition(".")[0]: min(held) for name, held in holders.items()}
    found: dict[str, Placement] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        split = lowered.plan.splits.get(name)
        planned = parse_layout(split) if split else whole(tuple(tensor.shape))
        held = holders.get(name, {homes.get(name.rpartition(".")[0], len(stages) - 1)})
        held = set(range(len(stages))) if name in everywhere else held
        dtype = tensor.dtype
        if isinstance(tensor, nn.Parameter):
            dtype = kept_dtype(dtype, lowered.plan.precision, is_trained=tensor.requires_grad)
        found[name] = Placement(
            sharding.layouts[refs[name]] if name in refs else planned,
            dtype,
            tuple(sorted(held)),
            tuple(sorted({lowered.plan.rank_of[s] for s in held})),
            isinstance(tensor, nn.Parameter),
            tensor.requires_grad,
        )
    return found


def whole(shape: tuple[int, ...]) -> Layout:
    """The layout of a tensor that is not split."""
    return Layout(tuple((DimFactor(size),) for size in shape))


def check_has_weights(model: nn.Module) -> None:
    """Raises `ConfigError` for a model whose weights an earlier `auto_parallel` took over."""
    for name, module in model.named_modules():
        own = (t for of in (module.parameters, module.buffers) for t in of(recurse=False))
        if module in _emptied and any(t.is_meta for t in own):
            where = f"module '{name}' of the model" if name else "the model"
            raise ConfigError(
                f"{where} ({type(module).__name__}) was given to auto_parallel before, which took "
                "its weights over: use what auto_parallel returned then, or build the model again"
            )


def take_over(
    model: nn.Module,
    placements: Mapping[str, Placement],
    groups: Groups,
    device: torch.device,
    seed: int,
) -> Tensors:
    """This rank's parts of the weights.

    The model's own tensors are replaced by meta tensors, so that no rank keeps the whole. Raises
    `ConfigError` as `initialise` does.
    """
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        initialise(model, seed)
    same_everywhere([*model.parameters(), *model.buffers()])
    _, pipeline_rank, tp_rank = groups.coordinates
    state: Tensors = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        place = placements[name]
        if pipeline_rank in place.ranks:
            part = place.layout.take(tensor.detach(), groups.mesh.tp, tp_rank).to(device)
            if place.is_parameter:
                part = nn.Parameter(part, requires_grad=place.requires_grad)
            state[name] = part
    replace_tensors(model, lambda tensor: torch.empty_like(tensor, device="meta"))
    _emptied.update(model.modules())
    return state


def shard_state(
    state: Tensors, placements: Mapping[str, Placement], lowered: Lowered, groups: Groups
) -> ShardedState | None:
    """Puts this rank's parameters into buckets; `state` then holds what it owns of them.

    None where there is one dp rank, and no precision but the model's own. Frozen parameters stay
    whole where parameters are not sharded. All ranks must call it.
    """
    plan = lowered.plan
    if plan.dp == 1 and plan.precision is None:
        return None
    own = groups.coordinates[1]
    used = dict.fromkeys(i.target for g in lowered.stages.graphs for i in parameters_in_order(g))
    held = []
    for name in dict.fromkeys([*used, *state]):
        if isinstance(state.get(name), nn.Parameter):
            place = placements[name]
            state[name] = _cast(state[name], place)
            shared = sum(plan.rank_of[s] == own for s in place.stages) > 1
            held.append(
                Held(name, place.dtype, state[name].numel(), place.stages, place.requires_grad,
                     shared, name in used)
            )  # fmt: skip
    every = sorted({plan.shards(s) for s in range(len(plan.rank_of))})
    made = {shards: ShardGroups(groups, shards) for shards in every}
    holders = {  # all ranks make all groups, in one order
        ranks: groups.holders(ranks) for ranks in sorted({p.ranks for p in placements.values()})
    }
    tied = {p.stages: holders[p.ranks] for p in placements.values() if own in p.ranks}
    specs = plan_buckets(held, plan.shards)
    sharded = ShardedState(specs, state, made, tied, plan.precision)
    state |= sharded.owned
    return sharded


def _cast(tensor: torch.Tensor, place: Placement) -> torch.Tensor:
    """The parameter in the dtype in which it is kept."""
    if tensor.dtype == place.dtype:
        return tensor
    return nn.Parameter(tensor.detach().to(place.dtype), requires_grad=tensor.requires_grad)


def replace_tensors(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Puts `make(tensor)` in the place of every parameter and buffer.

    Ties are kept; parameters stay parameters, and frozen ones frozen.
    """
    made: dict[int, torch.Tensor] = {}
    replaced: list[torch.Tensor] = []  # held, so that no id is used twice
    for module in model.modules():
        states: tuple[dict[str, torch.Tensor | None], ...]
        states = module._parameters, module._buffers  # type: ignore[assignment]
        for own in states:
            for key, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    replaced.append(tensor)
                    new = make(tensor.detach())
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    made[id(tensor)] = new
                own[key] = made[id(tensor)]


def initialise(model: nn.Module, seed: int) -> None:
    """Gives a model on the meta device its own initial weights, on the CPU.

    A model with `init_weights` (transformers) is initialised by that; of any other, each module's
    `reset_parameters` is called, outer modules first. `seed` alone determines the weights, so they
    are the same on every rank and layout; the random state is restored.

    Raises `ConfigError` where only some parameters are on the meta device, and for a module with
    tensors and no `reset_parameters`.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise ConfigError(
                f"parameter '{name}' is on {parameter.device} while others of "
                f"{type(model).__name__} are on the meta device; put all of them there, or none"
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        replace_tensors(model, lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t)
        whole = getattr(model, "init_weights", None)
        if callable(whole):
            whole()
            return
        for name, module in model.named_modules():
            # The second is torch.nn.MultiheadAttention's.
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if callable(reset):
                reset()
            elif any(True for own in (module.parameters, module.buffers) for _ in own(False)):
                raise ConfigError(
                    f"module '{name}' ({type(module).__name__}) is on the meta device and has no "
                    "reset_parameters; build the model on the CPU, or give the module one"
                )

"""What a run is beside its tensors, and the tensors of model and optimizers by their names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from merakc.errors import CheckpointError
from merakc.files.elements import bytes_of
from merakc.files.printable import count_of
from merakc.frontend.record import aliases_of
from merakc.runtime.part import TensorPart, place_of
from merakc.train.checkpoints.codec import encode
from merakc.train.checkpoints.manifest import EXTRA, OPTIMIZER, WEIGHTS
from merakc.train.model import ParallelModel
from merakc.train.parameters.elements import Known
from merakc.train.parameters.optimizers import is_together
from merakc.train.parameters.places import elsewhere
from merakc.train.parameters.states import tagged_state

Tensors = dict[str, torch.Tensor]
MEMBERS = ("params", "param_names")  # of a parameter group, beside its options
Optimizers = Sequence[torch.optim.Optimizer]
NEEDS = {"optimizer": ("param_groups", "state"), "scheduler": ("state_dict", "load_state_dict")}


def listed(one_or_more: Any, kind: str = "optimizer") -> list[Any]:
    """One, several or none, as a list. Raises `CheckpointError` for what is not of that kind."""
    if one_or_more is None:
        return []
    found = list(one_or_more) if isinstance(one_or_more, (list, tuple)) else [one_or_more]
    for one in found:
        if lacks := [name for name in NEEDS[kind] if not hasattr(one, name)]:
            raise CheckpointError(
                f"{kind}= holds a {type(one).__name__}, which has no {lacks[0]}: give one "
                f"{kind}, or a list of them"
            )
    return found


def weights_of(model: nn.Module) -> Tensors:
    """The parameters and persistent buffers, each under its first name: for tied ones their only
    one. Raises `CheckpointError` for state that is no tensor.
    """
    state = model.state_dict()
    aliases = model._own("_aliases") if isinstance(model, ParallelModel) else aliases_of(model)
    own = {WEIGHTS + name: value for name, value in state.items() if name not in aliases}
    known = {WEIGHTS + name for name in persistent(model)}
    for name, value in own.items():
        if name not in known or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"'{name.removeprefix(WEIGHTS)}' of the model's state_dict() is none of its "
                "parameters and buffers; give such state in extra="
            )
    return own


def persistent(model: nn.Module) -> list[str]:
    """The names under which the whole model's state is saved."""
    source = getattr(model, "_source", model)
    first = {n for n, _ in [*source.named_parameters(), *source.named_buffers()]}
    return [n for n in source.state_dict() if n in first]


def names_of(model: nn.Module) -> dict[torch.Tensor, str]:
    """The first name of every parameter on this rank."""
    named = model.named_parameters()
    if isinstance(model, ParallelModel):
        named = iter([*model._own("_steps").state.items(), *named])
    found: dict[torch.Tensor, str] = {}
    for name, p in named:
        found.setdefault(p, name)
    return found


def first_name(names: Mapping[torch.Tensor, str], p: torch.Tensor) -> str:
    """The name under which state of a parameter of an optimizer is kept."""
    name = names.get(p)
    if name is None:
        raise CheckpointError(
            f"the optimizer holds a parameter of shape {tuple(p.shape)} that is not one of the "
            "model's: make the optimizer of model.parameters(), after auto_parallel"
        )
    place = place_of(p)
    return place.name if place else name


def optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> tuple[Tensors, list[Any]]:
    """The optimizers' tensors by name, and of each the groups and its other state, as JSON."""
    names, tensors, records = names_of(model), {}, []
    for optimizer in optimizers:
        scalars: dict[str, Any] = {}
        groups = []
        if is_together(optimizer):
            raise CheckpointError(
                f"{type(optimizer).__name__} updates all parameters together, so that its state "
                "is of none by itself: save the model alone, and begin its state again"
            )
        _check_state(optimizer)
        for group in optimizer.param_groups:
            kept = [p for p in group["params"] if p not in elsewhere]
            own = [first_name(names, p) for p in kept]
            options = {k: v for k, v in group.items() if k not in MEMBERS}
            groups.append({"options": _plain(options, "param_groups"), "names": own})
            for name, p in zip(own, kept, strict=True):
                for key, value in tagged_state(optimizer, p, optimizer.state.get(p, {})).items():
                    if isinstance(value, torch.Tensor):
                        full = f"{OPTIMIZER}state.{name}.{key}"
                        if full in tensors:
                            raise CheckpointError(
                                f"two optimizers hold '{name}', each with a '{key}' of its own: "
                                "give them to two saves, in folders of their own"
                            )
                        tensors[full] = value
                    else:
                        scalars.setdefault(name, {})[key] = _plain(value, f"{name}.{key}")
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        records.append({"kind": kind, "groups": groups, "scalars": scalars})
    return tensors, records


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises `CheckpointError` for state that would be lost: of no parameter, as MADGRAD's 'k',
    under keys that are no names, or that the optimizer's own `state_dict()` adds.
    """
    lost = [f"state under {k!r}" for k in optimizer.state if not isinstance(k, torch.Tensor)]
    keys = (key for own in optimizer.state.values() if isinstance(own, Mapping) for key in own)
    lost += [f"state under {k!r}" for k in keys if not isinstance(k, str) or "." in k]
    if _adds(optimizer):
        added = optimizer.state_dict().keys() - {"state", "param_groups"}
        lost += [f"{k!r} in its state_dict()" for k in sorted(added, key=str)]
    if lost:
        raise CheckpointError(
            f"{type(optimizer).__name__} has {lost[0]}: only state of its parameters, under names "
            "without dots, could be given back; save the model alone, and begin its state again"
        )


def _adds(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `state_dict()` is not torch's alone."""
    kind = type(optimizer)
    is_torchs = kind.state_dict is torch.optim.Optimizer.state_dict
    return not is_torchs or bool(getattr(optimizer, "_optimizer_state_dict_post_hooks", None))


def _plain(value: Any, name: str) -> Any:
    """Options as JSON; tensors among them are numbers, as a learning rate may be."""
    found: Tensors = {}
    text = encode(value, found, name)
    large = [n for n, t in found.items() if t.numel() != 1]
    if large:
        raise CheckpointError(
            f"{large[0]} of the optimizer is a tensor that belongs to no elements"
        )
    return _with_numbers(text, found)


def _with_numbers(text: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(text, list):
        return [_with_numbers(v, tensors) for v in text]
    if not isinstance(text, dict):
        return text
    if text.get("__kind__") in ("tensor", "number", "array"):
        return tensors[text["name"]].item()
    return {k: _with_numbers(v, tensors) for k, v in text.items()}


def joined_records(everyone: Sequence[Sequence[Any]]) -> list[Any]:
    """The optimizers' records of the whole model, of those of all ranks.

    Raises `CheckpointError` where the ranks' optimizers differ.
    """
    found: list[Any] = []
    for rank, own in enumerate(everyone):
        if len(own) != len(everyone[0]):
            raise CheckpointError(
                f"rank {rank} gives {count_of(len(own), 'optimizer')}, and rank 0 "
                f"{len(everyone[0])}: give the same on all ranks"
            )
    for k, first in enumerate(everyone[0]):
        ranks = [own[k] for own in everyone]
        for rank, other in enumerate(ranks):
            options = [[g["options"] for g in one["groups"]] for one in (first, other)]
            if other["kind"] != first["kind"] or options[0] != options[1]:
                raise CheckpointError(
                    f"rank {rank}'s optimizer {k} is not as rank 0's: {_difference(first, other)}; "
                    "make it alike on all ranks"
                )
        groups = []
        for number, group in enumerate(first["groups"]):
            names = dict.fromkeys(n for own in ranks for n in own["groups"][number]["names"])
            groups.append({"options": group["options"], "names": list(names)})
        scalars = {name: v for own in ranks for name, v in own["scalars"].items()}
        found.append({"kind": first["kind"], "groups": groups, "scalars": scalars})
    return found


def _difference(first: Any, other: Any) -> str:
    if first["kind"] != other["kind"]:
        return f"{other['kind']} for {first['kind']}"
    for a, b in zip(first["groups"], other["groups"], strict=False):
        for key in a["options"].keys() | b["options"].keys():
            if a["options"].get(key) != b["options"].get(key):
                return f"{key} is {b['options'].get(key)!r} for {a['options'].get(key)!r}"
    return f"{len(other['groups'])} parameter groups for {len(first['groups'])}"


def extras(scheduler: Any, extra: Any) -> tuple[Any, Tensors]:
    """What the user gives beside model and optimizer, as JSON and tensors."""
    tensors: Tensors = {}
    states = [one.state_dict() for one in listed(scheduler, "scheduler")]
    found = {
        "scheduler": encode(states, tensors, "scheduler"),
        "extra": encode(stated(extra), tensors, "extra"),
    }
    for name, value in tensors.items():
        if isinstance(value, TensorPart) or (isinstance(value, Known) and value.source.is_part):
            raise _of_one_plan(name)
    return found, tensors


def _of_one_plan(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is this rank's part of the model or of its values, and another plan has other "
        "parts: keep such values in a copy of the model (copy.deepcopy(model), or AveragedModel), "
        "and save that as a checkpoint of its own: merakc.save(folder, copy)"
    )


def stated(extra: Any, name: str = "extra") -> Any:
    """What is given, with the state dict of everything that has one."""
    if isinstance(extra, nn.Module):
        inside = [m for m in extra.modules() if isinstance(m, ParallelModel)]
        if any(m.plan.mesh.world_size > 1 for m in inside):
            raise _of_one_plan(name)
    if callable(getattr(extra, "state_dict", None)):
        return extra.state_dict()
    if isinstance(extra, Mapping):
        return {key: stated(value, f"{name}.{key}") for key, value in extra.items()}
    return extra


def extras_digest(found: Any, tensors: Tensors) -> str:
    """What tells whether two ranks have the same extras."""
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(bytes_of(value).numpy().tobytes())
    return digest.hexdigest()


def joined_extras(
    everyone: Sequence[Any], digests: Sequence[str], tensors: Tensors
) -> tuple[list[Any], Tensors]:
    """The extras of each rank, or one where all ranks' are the same, and of this rank's `tensors`
    in them what it writes.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if len({*digests}) == 1:
        own = {f"{EXTRA}{name}": t for name, t in tensors.items()} if rank == 0 else {}
        return [everyone[0]], own
    return [*everyone], {f"{EXTRA}rank{rank}.{n}": t for n, t in tensors.items()}


def parallel_state(model: nn.Module) -> dict[str, Any]:
    """What a parallel model's steps go by beside its tensors."""
    if not isinstance(model, ParallelModel):
        return {}
    steps = model._own("_steps")
    scale = steps.loss_scale
    return {
        "step": steps.taken,
        "drawn": steps.drawn,
        "seed": steps.seed,
        "loss_scale": None if scale is None else {
            "scale": scale.scale, "good_steps": scale.good_steps, "skipped": scale.skipped,
        },
    }  # fmt: skip


def resume(model: nn.Module, saved: Mapping[str, Any]) -> int:
    """Sets what `parallel_state` has told; the steps taken."""
    step: int = saved.get("step", 0)
    if isinstance(model, ParallelModel) and saved:
        steps = model._own("_steps")
        steps.taken, steps.seed = step, saved.get("seed", steps.seed)
        steps.drawn = saved.get("drawn", step)  # one for each step, in older checkpoints
        steps.stale.clear()
        steps.agreement.parted = ""
        scale = saved.get("loss_scale")
        if steps.loss_scale is not None and scale is not None:
            steps.loss_scale.skipped = scale["skipped"]
            if steps.loss_scale.dynamic and scale["scale"] != 1.0:
                steps.loss_scale.scale = scale["scale"]
                steps.loss_scale.good_steps = scale["good_steps"]
    return step

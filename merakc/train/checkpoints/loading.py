"""`merakc.load`: a run goes on, under whatever plan the model has now."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from merakc.errors import CheckpointError
from merakc.runtime.groups import agree, together
from merakc.runtime.health.job import all_ranks, call
from merakc.runtime.part import TensorPart, place_of, plain
from merakc.train.checkpoints.codec import decode
from merakc.train.checkpoints.manifest import (
    EXTRA,
    OPTIMIZER,
    WEIGHTS,
    Manifest,
    Stored,
    check_files,
    read_manifest,
    stored_name,
)
from merakc.train.checkpoints.run_state import (
    Tensors,
    first_name,
    listed,
    names_of,
    resume,
    weights_of,
)
from merakc.train.checkpoints.saving import as_merak_error, checkpoints_in
from merakc.train.checkpoints.storage import Reader
from merakc.train.checkpoints.untied import tied_names, untied
from merakc.train.parameters.optimizers import check, updated_whole
from merakc.train.parameters.places import elsewhere


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the folder, the training steps taken until then, and `extra` as it was
    given to `save`.
    """

    folder: Path
    step: int
    extra: Any


def latest(folder: str | Path) -> Path | None:
    """The newest checkpoint in a folder all of whose bytes are as they were written; None if there
    is none. Where there are several ranks, all must call it, and each checks its share.
    """
    with call("merakc.latest"):
        return _latest(Path(folder))


def _latest(folder: Path) -> Path | None:
    for path in reversed(checkpoints_in(folder)):
        bad = together(lambda path=path: _problem(path))  # type: ignore[misc]
        if not any(bad):
            return path
        text = next(text for text in bad if text)
        warnings.warn(f"passed over: {text}", stacklevel=5)
    return None


def _problem(path: Path) -> str:
    try:
        check_files(path, read_manifest(path), *_share())
    except CheckpointError as error:
        return str(error)
    return ""


def _share() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Any = None,
    *,
    untied: bool = False,
) -> Loaded:
    """Loads what `save` wrote, on any plan and number of ranks. Every rank must call it.

    All bytes are checked before anything is changed. Weights take the dtype that the model has.

    Args:
        folder: a checkpoint, or a folder of checkpoints, of which the newest good one is taken.
        model: the same model as was saved, under any plan or none.
        optimizer: as many as were saved, made of the model's parameters; their options, such as
            the learning rate, become the saved ones.
        scheduler: as many as were saved.
        extra: of the same form as was saved: its objects with a `load_state_dict()` load theirs.
        untied: whether parameters that were tied to others when they were saved, and are not in
            this model, get copies of these and of the optimizers' state (docs/pseudo-to-real.md).

    Raises `CheckpointError` on every rank for files that were changed since they were written, and
    for a model or an optimizer that is not the saved one; nothing was changed then.
    """
    with call("merakc.load"):
        return _load(Path(folder).absolute(), model, optimizer, scheduler, extra, untied)


def _load(
    folder: Path, model: nn.Module, optimizer: Any, scheduler: Any, extra: Any, is_untied: bool
) -> Loaded:
    chosen = folder
    manifest, problem = _manifest(folder)
    if manifest is None and (newest := latest(folder)) is not None:
        chosen, (manifest, problem) = newest, _manifest(newest)

    def checked() -> bool:
        if manifest is None:
            raise CheckpointError(problem)
        check_files(chosen, manifest, *_share())
        return True

    together(checked)
    assert manifest is not None
    told = hash_of(manifest)
    agree(lambda: {"checkpoint": f"{chosen.name} {told}, untied={is_untied}"})
    optimizers, schedulers = listed(optimizer), listed(scheduler)
    copies: dict[str, str] = {}
    if is_untied:
        manifest, copies = untied(manifest, set(_persistent(model)))

    @cache
    def targets() -> tuple[Tensors, list[Any], Tensors]:
        weights = _weights(model, manifest)
        states, tensors = _states(model, optimizers, manifest)
        given = _extras(manifest)
        _check_schedulers(schedulers, manifest)
        return weights | tensors | given, states, given

    together(lambda: bool(targets()))
    tensors, states, given = targets()
    _read(Reader(chosen, manifest, copies), tensors)
    with torch.no_grad():
        for one, state in zip(optimizers, states, strict=True):
            one.load_state_dict(state)
    found = _decoded(manifest, given)
    for one, state in zip(schedulers, found["scheduler"], strict=True):
        one.load_state_dict(state)
    _restore(extra, found["extra"])
    return Loaded(chosen, resume(model, manifest.run.get("parallel", {})), found["extra"])


def _manifest(folder: Path) -> tuple[Manifest | None, str]:
    try:
        return read_manifest(folder), ""
    except CheckpointError as error:
        return None, str(error)


def hash_of(manifest: Manifest) -> str:
    """Twelve letters that tell manifests apart."""
    return hashlib.sha256(manifest.text().encode()).hexdigest()[:12]


def _weights(model: nn.Module, manifest: Manifest) -> Tensors:
    """This rank's parameters and buffers, to be written into."""
    own = weights_of(model)
    whole = set(_persistent(model))
    saved = {stored_name(n) for n in manifest.tensors if n.startswith(WEIGHTS)}
    if missing := sorted(whole - saved):
        behind = "and the checkpoint has not"
        if tied := tied_names(manifest, whole):
            behind += f", where '{min(tied)}' is '{tied[min(tied)]}': untied=True gives each a copy"
        raise CheckpointError(_names(missing, "the model has", behind))
    if unknown := sorted(saved - whole):
        raise CheckpointError(_names(unknown, "the checkpoint has", "and the model has not"))
    for name, tensor in own.items():
        _check_shape(stored_name(name), tensor, manifest.tensors[name])
    return own


def _persistent(model: nn.Module) -> list[str]:
    """The names under which the whole model's state is saved."""
    source = getattr(model, "_source", model)
    first = {n for n, _ in [*source.named_parameters(), *source.named_buffers()]}
    return [n for n in source.state_dict() if n in first]


def _names(names: list[str], before: str, behind: str) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{before} {', '.join(map(repr, names[:3]))}{more}, {behind}"


def _check_shape(name: str, tensor: torch.Tensor, stored: Stored) -> None:
    if tuple(tensor.shape) != stored.shape:
        raise CheckpointError(
            f"'{name}' is {tuple(tensor.shape)} in the model and {stored.shape} in the checkpoint"
        )


def _states(
    model: nn.Module, optimizers: list[Any], manifest: Manifest
) -> tuple[list[Any], Tensors]:
    """State dicts for the optimizers, and their tensors, to be written into."""
    records = manifest.run.get("optimizers", [])
    if optimizers and len(optimizers) != len(records):
        raise CheckpointError(
            f"{len(optimizers)} optimizers are given, and {len(records)} were saved"
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
            before = number - len(group["params"])
            groups.append({**group, **options, "params": list(range(before, number))})
        state = {k: v for k, v in state.items() if v}
        found.append({"state": state, "param_groups": groups})
    return found, tensors


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
        elementwise = bool(stored.shape) and stored.shape == whole
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
        if isinstance(old, torch.Tensor) and old.shape == own.shape and old.dtype == dtype:
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


def _extras(manifest: Manifest) -> Tensors:
    """The user's tensors, that this rank is to get."""
    return {
        name: torch.empty(stored.shape, dtype=stored.torch_dtype)
        for name, stored in manifest.tensors.items()
        if name.startswith(EXTRA)
    }


def _decoded(manifest: Manifest, tensors: Tensors) -> Any:
    """What the user gave on this rank."""
    every = manifest.run["extras"]
    rank, world = _share()
    if len(every) == 1:
        return decode(every[0], {stored_name(n): t for n, t in tensors.items()})
    if world != len(every):
        warnings.warn(
            f"extra= was saved by {len(every)} ranks, each with its own, and there are {world} "
            "now: every rank gets the list of all, and load_state_dict() is called on none",
            stacklevel=3,
        )
        found = [_of_rank(every[k], k, tensors) for k in range(len(every))]
        return {"scheduler": found[0]["scheduler"], "extra": [f["extra"] for f in found]}
    return _of_rank(every[rank], rank, tensors)


def _of_rank(told: Any, rank: int, tensors: Tensors) -> Any:
    prefix = f"{EXTRA}rank{rank}."
    return decode(
        told, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    )


def _check_schedulers(schedulers: list[Any], manifest: Manifest) -> None:
    saved = manifest.run["extras"][0]["scheduler"]
    if schedulers and len(schedulers) != len(saved):
        raise CheckpointError(
            f"{len(schedulers)} schedulers are given, and {len(saved)} were saved"
        )


def _restore(given: Any, saved: Any) -> None:
    if callable(getattr(given, "load_state_dict", None)):
        given.load_state_dict(saved)
    elif isinstance(given, Mapping) and isinstance(saved, Mapping):
        for key in given.keys() & saved.keys():
            _restore(given[key], saved[key])


def _read(reader: Reader, tensors: Tensors) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp_load(
                tensors,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=all_ranks(),
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        what = f"{reader.folder} could not be read, and the model holds parts of it now"
        raise as_merak_error(error, what) from None

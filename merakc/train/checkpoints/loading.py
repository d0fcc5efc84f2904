"""`merakc.load`: a run goes on, under whatever plan the model has now."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
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

from merakc.errors import CheckpointError, MerakWarning
from merakc.files.printable import count_of
from merakc.runtime.groups import agree, from_rank_0, together
from merakc.runtime.health.job import all_ranks, call
from merakc.runtime.part import TensorPart, plain
from merakc.train.checkpoints.codec import extras_of, extras_of_rank
from merakc.train.checkpoints.manifest import (
    EXTRA,
    NAME,
    WEIGHTS,
    Manifest,
    Stored,
    check_files,
    read_manifest,
    stored_name,
)
from merakc.train.checkpoints.optimizer_state import states_for
from merakc.train.checkpoints.run_state import (
    Tensors,
    listed,
    persistent,
    resume,
    weights_of,
)
from merakc.train.checkpoints.saving import as_own_error, checkpoints_in, from_here
from merakc.train.checkpoints.storage import Reader
from merakc.train.checkpoints.untied import tied_names, untied


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
    for name in from_rank_0(lambda: [path.name for path in reversed(checkpoints_in(folder))]):
        path = folder / name
        seen = together(lambda: os.path.isdir(folder))
        if not all(seen):
            raise CheckpointError(
                f"rank {seen.index(False)} sees no folder {folder}, in which rank 0 finds {name}: "
                "checkpoints must lie where all ranks see them, on all machines"
            )
        bad = together(lambda path=path: _problem(path))  # type: ignore[misc]
        if not any(bad):
            return path
        text = next(text for text in bad if text)
        warnings.warn(f"passed over: {text}", MerakWarning, stacklevel=5)
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
    own: Any = getattr(model, "_own", None)
    sharded = own("_steps").sharded if own is not None else None
    updates = sharded.updates if sharded is not None else None
    loading = updates.loading(listed(optimizer)) if updates is not None else nullcontext()
    with call("merakc.load"), loading:
        return _load(from_here(folder), model, optimizer, scheduler, extra, untied)


def _load(
    folder: Path, model: nn.Module, optimizer: Any, scheduler: Any, extra: Any, is_untied: bool
) -> Loaded:
    chosen = folder
    if not from_rank_0(lambda: os.path.exists(folder / NAME)):
        chosen = latest(folder) or folder
    manifest, problem = _manifest(chosen)

    def checked() -> bool:
        if manifest is None:
            raise CheckpointError(problem)
        check_files(chosen, manifest, *_share())
        return True

    together(checked)
    assert manifest is not None
    told = hash_of(manifest)
    optimizers, schedulers = listed(optimizer), listed(scheduler, "scheduler")
    numbers = f"{len(optimizers)} optimizers and {len(schedulers)} schedulers"
    agree(lambda: {"checkpoint": f"{chosen.name} {told}, untied={is_untied}, for {numbers}"})
    copies: dict[str, str] = {}
    if is_untied:
        manifest, copies = untied(manifest, set(persistent(model)))

    @cache
    def targets() -> tuple[Tensors, list[Any], Tensors]:
        weights = _weights(model, manifest)
        states, tensors = states_for(model, optimizers, manifest)
        given = _extras(manifest)
        _check_schedulers(schedulers, manifest)
        return weights | tensors | given, states, given

    together(lambda: bool(targets()))
    tensors, states, given = targets()
    _read(Reader(chosen, manifest, copies), tensors)
    found = _decoded(manifest, given)

    def taken() -> None:
        """What code of the user's takes part in, which may fail on one rank alone."""
        _hand_over(model, tensors)
        with torch.no_grad():
            for one, state in zip(optimizers, states, strict=True):
                one.load_state_dict(state)
        for one, state in zip(schedulers, found["scheduler"], strict=False):  # or none are given
            one.load_state_dict(state)
        if len(manifest.run["extras"]) in (1, _share()[1]):
            _restore(extra, found["extra"])

    together(taken)
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
    whole = set(persistent(model))
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


def _hand_over(model: nn.Module, tensors: Tensors) -> None:
    """Loads what the model's `state_dict()` is not the memory of, but a copy, as its own code or
    its hooks make.
    """
    named: Tensors = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False))
    held = {name: plain(tensor).data_ptr() for name, tensor in named.items()}
    state = {stored_name(n): t for n, t in tensors.items() if n.startswith(WEIGHTS)}
    local = {n: t.local if isinstance(t, TensorPart) else t for n, t in state.items()}
    if any(held.get(name) != t.data_ptr() for name, t in local.items()):
        model.load_state_dict(state, strict=False)


def _names(names: list[str], before: str, behind: str) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{before} {', '.join(map(repr, names[:3]))}{more}, {behind}"


def _check_shape(name: str, tensor: torch.Tensor, stored: Stored) -> None:
    if tuple(tensor.shape) != stored.shape:
        raise CheckpointError(
            f"'{name}' is {tuple(tensor.shape)} in the model and {stored.shape} in the checkpoint"
        )
    own, saved = tensor.dtype, stored.torch_dtype
    if own != saved and not (own.is_floating_point and saved.is_floating_point):
        raise CheckpointError(
            f"'{name}' is {own} in the model and {saved} in the checkpoint: only between floating "
            "dtypes are values cast"
        )
    if tensor.is_meta:
        raise CheckpointError(
            f"'{name}' of the model is on the meta device, where it holds no values: give it "
            "memory first (model.to_empty(device=...)), or read the weights by "
            "auto_parallel(weights=...)"
        )


def _extras(manifest: Manifest) -> Tensors:
    """The user's tensors, that this rank is to get. Raises `CheckpointError` where what they belong
    to is damaged, before anything changes.
    """
    found: Tensors = {
        name: torch.empty(stored.shape, dtype=stored.torch_dtype)
        for name, stored in manifest.tensors.items()
        if name.startswith(EXTRA)
    }
    extras_of(manifest.run["extras"], _by_name(found))
    return found


def _by_name(tensors: Tensors) -> Tensors:
    return {stored_name(name): tensor for name, tensor in tensors.items()}


def _decoded(manifest: Manifest, tensors: Tensors) -> Any:
    """What the user gave on this rank."""
    every, (rank, world) = manifest.run["extras"], _share()
    own = _by_name(tensors)
    if 1 < len(every) == world:
        return extras_of_rank(every[rank], rank, own)
    if len(every) > 1:
        warnings.warn(
            f"extra= was saved by {count_of(len(every), 'rank')}, each with its own, and there are "
            f"{world} now: every rank gets the list of all, and load_state_dict() is called on "
            "none",
            stacklevel=3,
        )
    return extras_of(every, own)


def _check_schedulers(schedulers: list[Any], manifest: Manifest) -> None:
    saved = manifest.run["extras"][0]["scheduler"]
    if schedulers and len(schedulers) != len(saved):
        raise CheckpointError(
            f"{count_of(len(schedulers), 'scheduler')} are given, and {len(saved)} were saved"
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
        raise as_own_error(error, _share()[0], what) from None

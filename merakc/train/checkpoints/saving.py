"""`merakc.save`: a run's state into a folder, by all ranks at once."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from merakc.errors import CheckpointError, MerakError, MerakWarning
from merakc.frontend.record import aliases_of
from merakc.machines.garbage import few_collections
from merakc.runtime.groups import agree, together
from merakc.runtime.health.job import (
    ALONE_S,
    call,
    explained,
    inside,
    new_group,
)
from merakc.runtime.part import TensorPart
from merakc.train.checkpoints.manifest import NAME, read_manifest
from merakc.train.checkpoints.run_state import (
    Tensors,
    extras,
    extras_digest,
    joined_extras,
    joined_records,
    listed,
    optimizer_tensors,
    parallel_state,
    weights_of,
)
from merakc.train.checkpoints.storage import Writer
from merakc.train.model import ParallelModel
from merakc.train.steps import Steps


class Saving:
    """A save that runs while training goes on."""

    def __init__(self, folder: Path, future: Future[None]) -> None:
        self.folder, self._future, self._told = folder, future, False
        self._process = os.getpid()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> Path:
        """The folder, once it is complete. Raises `CheckpointError` where it could not be written,
        `TimeoutError` after `timeout_s`.
        """
        if os.getpid() != self._process and not self.done:
            raise CheckpointError(
                f"{self.folder} is written by process {self._process}, from which this one was "
                "forked: wait for it there"
            )
        error = self._future.exception(timeout_s)
        self._told = True
        if error is not None:
            raise error
        return self.folder


_running: list[Saving] = []


def _end_earlier() -> str:
    """Waits for earlier saves; raises what nobody was told of how they ended. Nothing, as text."""
    while _running:
        try:
            if not _running[0]._told:
                _running[0].wait()
        finally:  # one that goes on, as after Ctrl-C, is waited for again: it reads the copies
            if _running[0].done:
                del _running[0]
    return ""


def _end_all() -> None:
    """The same at the end of the process, where nobody can be told any more."""
    try:
        _end_earlier()
    except Exception as error:
        warnings.warn(str(error), MerakWarning, stacklevel=1)


def from_here(folder: str | Path) -> Path:
    """The whole path, as the file system reads it: behind a link `..` is the folder that its target
    lies in.
    """
    try:
        return Path(folder).absolute()
    except TypeError:
        raise CheckpointError(f"folder={type(folder).__name__}: give the path of one") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: the working directory has gone ({error})") from None


def place_of_folder(folder: str | Path) -> Path:
    """Where a folder that is to be written lies, from wherever the process goes."""
    found = from_here(folder)
    if found.name in ("", ".."):
        raise CheckpointError(f"{found} is no folder that can be replaced; give a new one in it")
    return found


@few_collections()
def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
    wait: bool = True,
) -> Saving:
    """Saves a run so that `load` goes on with it under any plan. Every rank must call it.

    The folder holds the whole weights as safetensors, which `from_pretrained` reads, the state of
    the optimizers, the step and the seed of random draws, and a checksum of all of that. It is
    written aside and renamed: it is there whole, or not at all.

    Args:
        folder: the checkpoint; one that is there under that name is replaced, nothing else is.
        model: a parallel model, or any `nn.Module` in one process.
        optimizer: one or several, whose state belongs to single elements, as AdamW's does.
        scheduler: one or several learning-rate schedulers, or whatever has a `state_dict()`.
        extra: numbers, texts, containers, tensors and objects with a `state_dict()`: where the
            data stand, random states; ranks may give different ones.
        keep_last: how many checkpoints stay beside each other in the folder above; those that were
            saved first are deleted after this one is complete.
        wait: whether to return only when it is written. Otherwise it is written while training
            goes on, from a copy in host memory; `Saving.wait` says how that ended.

    Raises `CheckpointError` on every rank for a folder that cannot be written, and for state that
    no other plan could load, inside of another call, and `MismatchError` for ranks that stand
    elsewhere in their steps; the run itself stays as it was.
    """
    if around := inside():
        raise CheckpointError(
            f"merakc.save is called inside of {around}, as the handler of a signal may be, where "
            "every rank is elsewhere in a step: let the handler set a flag, and save between steps"
        )
    with call("merakc.save"):
        folder = _agreed(folder, model, keep_last, wait)
        tensors, writer = _collected(folder, model, optimizer, scheduler, extra)
        if wait:
            write(tensors, writer, saving_group(), keep_last)
            done: Future[None] = Future()
            done.set_result(None)
            return Saving(folder, done)
        group = saving_group()
        copied: Tensors = {}  # by all ranks, or by none: their threads would wait for each other
        together(lambda: copied.update(_on_host(tensors, _copies.setdefault(model, {}))))
    writing = _thread().submit(write, copied, writer, group, keep_last)
    started = Saving(folder, writing)
    _running.append(started)
    return started


def _agreed(given: str | Path, model: Any, keep_last: int | None, is_awaited: bool) -> Path:
    """The folder, once all earlier saves have ended on all ranks, and they agree on this one."""
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise CheckpointError(f"keep_last={keep_last}: at least this checkpoint stays; give 1")
    folder = place_of_folder(given)
    asked = f"folder={folder.name!r}, keep_last={keep_last}, wait={is_awaited}"
    if isinstance(model, ParallelModel):
        steps = model._own("_steps")
        after = "after" if steps.agreement.settings else "before"
        asked += f", behind {steps.taken} losses, {after} an optimizer's step"
    agree(lambda: {"merakc.save": _end_earlier() + asked})
    return folder


def _collected(
    folder: Path, model: nn.Module, optimizer: Any, scheduler: Any, extra: Any
) -> tuple[Tensors, Writer]:
    """What this rank writes, and how; collective."""

    def own() -> tuple[Tensors, list[Any], Any, Tensors]:
        if not isinstance(model, nn.Module):
            raise CheckpointError(f"model={type(model).__name__}: give the model, an nn.Module")
        tensors, records = optimizer_tensors(model, listed(optimizer))
        return weights_of(model) | tensors, records, *extras(scheduler, extra)

    made = cache(own)

    def of_all() -> tuple[list[Any], Any, str]:
        _, records, found, given = made()
        return records, found, extras_digest(found, given)

    records, extra_of, digests = zip(*together(of_all), strict=True)
    tensors, _, _, given = made()
    joined = joined_records(records)
    told, written = joined_extras(extra_of, digests, given)
    run = {
        "model": type(getattr(model, "_source", model)).__name__,
        "parameters": parameter_names(model),
        "tied": aliases_of(getattr(model, "_source", model)),
        "world_size": len(records),
        "saved_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "parallel": parallel_state(model),
        "optimizers": joined,
        "extras": told,
    }
    others = {}
    config = config_of(model)
    if config:
        others["config.json"] = config
    if isinstance(model, ParallelModel) and model.rank == 0:
        plan_hash, others["plan.json"] = _plan_of(model._own("_steps"))
        run["plan"] = {"hash": plan_hash, "precision": str(model.plan.precision or "")}
    return tensors | written, Writer(folder, run, others)


_plans: WeakKeyDictionary[Steps, tuple[str, str]] = WeakKeyDictionary()


def _plan_of(steps: Steps) -> tuple[str, str]:
    """The hash and the text of a plan, which stay as they are: they take half a second."""
    if steps not in _plans:
        _plans[steps] = steps.file.hash, steps.file.text
    return _plans[steps]


def parameter_names(model: nn.Module) -> list[str]:
    """Of the whole model, in its order."""
    return [n for n, _ in getattr(model, "_source", model).named_parameters()]


def config_of(model: nn.Module) -> str:
    """The config that `from_pretrained` needs, of a model of transformers."""
    config = getattr(getattr(model, "_source", model), "config", None)
    written = getattr(config, "to_json_string", None)
    if not callable(written):
        return ""
    found = json.loads(written())
    found.setdefault("architectures", [type(getattr(model, "_source", model)).__name__])
    return json.dumps(found, indent=2) + "\n"


# What was copied to host memory for the last save of a model. Its memory is used again: memory that
# is new to a process takes four times as long to write.
_copies: WeakKeyDictionary[nn.Module, Tensors] = WeakKeyDictionary()


def _on_host(tensors: Tensors, copies: Tensors) -> Tensors:
    """Copies of a rank's tensors, in the memory of earlier `copies` where these are alike."""
    found = {}
    for name, tensor in tensors.items():
        local = tensor.local if isinstance(tensor, TensorPart) else tensor.detach()
        copy = copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (local.shape, local.dtype):
            copy = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
        copies[name] = copy.copy_(local, non_blocking=local.is_cuda)
        found[name] = TensorPart(copy, tensor.place) if isinstance(tensor, TensorPart) else copy
    for name in [*copies]:
        if name not in found:
            del copies[name]
    if any(copy.is_pinned() for copy in copies.values()):
        torch.cuda.synchronize()
    return found


def write(
    tensors: Mapping[str, torch.Tensor],
    writer: Writer,
    group: dist.ProcessGroup | None,
    keep_last: int | None,
) -> None:
    """Writes all ranks' tensors; collective over the group. Without one, this process does alone,
    in a job of many too.
    """
    writer.group = group
    try:
        rank = dist.get_rank(group) if group is not None else 0
        _save_state_dict(  # what torch's `save` calls, which warns where there is one process
            dict(tensors),
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False),
            process_group=group,
            no_dist=group is None,
        )
    except RuntimeError as error:
        raise explained(error) from error
    except (ValueError, AssertionError) as error:  # torch.distributed's, of a group that is gone
        raise CheckpointError(
            f"{writer.folder} was not written: {error}; a save without waiting needs the process "
            "group until it has ended: call wait() on what it returns before that is destroyed"
        ) from error
    except CheckpointException as error:
        shutil.rmtree(writer.aside, ignore_errors=True)
        raise as_own_error(error, rank, f"{writer.folder} was not written") from None
    if keep_last is not None and rank == 0:
        forget_old(writer.folder, keep_last)


def as_own_error(error: CheckpointException, own_rank: int, what: str) -> BaseException:
    """The first rank's failure in one line; on a rank that was told to stop, as by Ctrl-C, that."""
    own, _ = error.failures.get(own_rank, (None, None))
    if own is not None and not isinstance(own, Exception):
        return own
    rank, (cause, _) = min(error.failures.items())
    text = (
        str(cause)
        if isinstance(cause, (MerakError, OSError))
        else f"{type(cause).__name__}: {cause}"
    )
    return CheckpointError(f"{what}: rank {rank}: {' '.join(text.split())}")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of runs in a folder in the order in which they were saved, which is not that
    of their steps where a run went back to an older one. Weights alone, as exports are, belong to
    none; what is damaged is passed over with a warning.

    Raises `CheckpointError` where the folder cannot be read.
    """
    try:
        among = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    found = []
    for path in among:
        if path.name.startswith(".") or not os.path.isfile(path / NAME):
            continue
        try:
            run = read_manifest(path).run
        except CheckpointError as error:
            if os.path.isfile(path / NAME):  # else it was deleted by now
                warnings.warn(f"passed over: {error}", MerakWarning, stacklevel=2)
            continue
        if (parallel := run.get("parallel")) is not None:
            found.append((run.get("saved_at", ""), parallel.get("step", 0), path))
    return [path for *_, path in sorted(found)]


def forget_old(folder: Path, keep_last: int) -> None:
    """Deletes the oldest checkpoints beside this one, until so many are left."""
    others = [p for p in checkpoints_in(folder.parent) if p != folder and not p.is_symlink()]
    for path in others[: max(0, len(others) + 1 - keep_last)]:
        shutil.rmtree(path, ignore_errors=True)


@cache
def _thread() -> ThreadPoolExecutor:
    atexit.register(_end_all)
    return ThreadPoolExecutor(1, "merakc-save")


def _forget() -> None:
    """In a forked child, which has neither the thread nor the saves of its parent."""
    _thread.cache_clear()
    _running.clear()


os.register_at_fork(after_in_child=_forget)


_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def saving_group() -> dist.ProcessGroup | None:
    """The ranks' group for saves, whose messages come from host memory, beside those of training;
    None in one process alone.
    """
    if not dist.is_initialized():
        return None
    whole = dist.group.WORLD
    assert whole is not None
    if whole not in _groups:
        _groups[whole] = new_group(range(dist.get_world_size()), ALONE_S, "gloo")
    return _groups[whole]

"""A model's weights: found their places under a plan, and moved to the ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from merakc.errors import ConfigError, MismatchError
from merakc.files.printable import count_of
from merakc.ir.graph import InputKind, OutputKind, Ref
from merakc.ir.layout import parse_layout, whole_layout
from merakc.ir.precision import kept_dtype
from merakc.lowering.lowered import Lowered
from merakc.runtime.groups import Groups, together
from merakc.runtime.health.job import all_ranks
from merakc.runtime.state import Placement
from merakc.train.checkpoints.weight_files import Weights, open_weights
from merakc.train.mirror import Mirror
from merakc.train.parameters.initial import initialise, replace_tensors
from merakc.train.parameters.parts import Digests, Parts, unlike
from merakc.train.told import note, warn_of_line

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
    everywhere = {i.target for i in known.part.inputs if i.kind in STATE} if known else set()
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
        planned = parse_layout(split) if split else whole_layout(tensor.shape)
        held = holders.get(name, {homes.get(name.rpartition(".")[0], len(stages) - 1)})
        held = set(range(len(stages))) if name in everywhere else held
        dtype = tensor.dtype
        if isinstance(tensor, nn.Parameter):
            dtype = kept_dtype(dtype, lowered.plan.precision, is_trained=tensor.requires_grad)
        found[name] = Placement(
            sharding.weight_layout(refs[name]) if name in refs else planned,
            dtype,
            tuple(sorted(held)),
            tuple(sorted({lowered.plan.rank_of[s] for s in held})),
            isinstance(tensor, nn.Parameter),
            tensor.requires_grad,
        )
    return found


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


def check_is_plain(model: nn.Module) -> None:
    """Raises `ConfigError` for a model that `auto_parallel` has returned, or one around it, and
    for what `torch.compile` has.
    """
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules:
            raise ConfigError(
                f"{f'module {name!r} of the model' if name else 'the model'} is one that "
                "torch.compile has returned: give auto_parallel the model as it was (its "
                "_orig_mod), of which it compiles whole steps"
            )
        if isinstance(module, Mirror):
            where = f"module '{name}' of the model" if name else "the model"
            raise ConfigError(
                f"{where} is one that auto_parallel has returned: train with that as it is, or "
                "build the model again and give auto_parallel all that is to be trained"
            )


def opened(model: nn.Module, weights: str | Path | None) -> Weights | None:
    """The files that weights are read from; None for a model that has them. Every rank must call
    it. Raises `CheckpointError` as `open_weights` does, and `ConfigError` for neither.
    """
    if weights is None:
        check_has_weights(model)
        return None
    found = cache(lambda: open_weights(weights, model))
    together(lambda: bool(found()))
    return found()


def take_over(
    model: nn.Module, state: Tensors, placements: Mapping[str, Placement], groups: Groups,
    seed: int, files: Weights | None = None,
) -> None:  # fmt: skip
    """Fills this rank's `state` with its parts of the weights: of `files`, of the model's own
    tensors, or of what the model initialises itself with where it is on the meta device.

    The model's own tensors are replaced by meta tensors, each as soon as it was taken, so that no
    rank keeps the whole. Every rank must call it. Raises `ConfigError` as `initialise` does,
    `CheckpointError` for damaged files, and `MismatchError` where ranks read other weights. Where
    the models of the ranks differ, all get rank 0's, with a warning.
    """
    held = set() if files is None else files.tensors.keys()
    on_meta = {n: t.is_meta for n, t in (*model.named_parameters(), *model.named_buffers())}
    rest = on_meta.keys() - held
    made = {name for name in rest if on_meta[name]}
    parts = Parts(state, placements, groups)
    if files is not None or made:
        share = groups.rank, groups.mesh.world_size

        def fill() -> Digests:
            if files is not None:
                files.check(*share)
                for name, read in files.read():
                    parts.put(name, read)
            if made:
                initialise(model, seed, rest, parts.put_whole)
            note("weights", _origin(len(on_meta) - len(rest), len(made), seed))
            return parts.digests

        if differing := unlike(together(fill)):
            raise MismatchError(
                f"the ranks have different weights: {differing}; give all ranks the same files"
            )
    if rest and not made:
        _take(model, rest, parts)
    replace_tensors(model, lambda _, tensor: torch.empty_like(tensor, device="meta"))
    _emptied.update(model.modules())
    assert parts.taken >= state.keys(), state.keys() - parts.taken


def _origin(read: int, made: int, seed: int) -> str:
    """Where weights that the model did not have come from: nobody is to take them for others."""
    parts = [f"{count_of(read, 'tensor')} read from files"] * bool(read)
    if made:
        parts.append(
            f"{count_of(made, 'tensor')} of the meta device made anew by the model's own "
            f"initialisation, with seed {seed}"
        )
    return "; ".join(parts)


def _take(model: nn.Module, names: Collection[str], parts: Parts) -> None:
    """Takes the model's own tensors, once they are known to be the same on all ranks."""
    parts.digests.clear()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in names:
            parts.compare(name, tensor.detach())
    differing = unlike(together(lambda: parts.digests))
    if differing and dist.get_rank() == 0:
        warn_of_line(
            f"the models of the ranks have different weights: {differing}; all ranks train with "
            "rank 0's. Build the same model on every rank, as with the same torch.manual_seed"
        )

    def take(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if name not in names:
            return None
        if differing:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            dist.broadcast(tensor, 0, all_ranks())
        parts.put_whole(name, tensor)
        return torch.empty_like(tensor, device="meta")

    replace_tensors(model, take)

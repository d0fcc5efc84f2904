"""How the samples of the whole batch lie over dp ranks, each of which sees its own alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from merakc.batches.split import batch_size_of, call_arguments, named_tensors, sample_rows
from merakc.errors import ConfigError, MismatchError
from merakc.frontend.python.content import content_hash
from merakc.ir.batches import BatchDims, BatchLayout
from merakc.ir.plan import Plan
from merakc.kernels.collectives import gather_into
from merakc.runtime.groups import Groups, together
from merakc.train.lengths import lengths_mark


def layout_of(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    plan: Plan,
    dp_rank: int,
    group: dist.ProcessGroup | None,
    *,
    follows: bool = False,
    copied: bool = False,
) -> BatchLayout:
    """How the samples lie, of which this is a dp rank's batch, or all where it is `copied` to each;
    collective over `group`, the ranks of dp. Their hosts tell each other: none waits for what its
    device still does. Where the plan's number of micro-batches `follows` the batch, it is the
    largest, up to that, into which all divide.

    Raises `MismatchError` on all of them where their batches, by their sizes, hold the samples in
    other places, or are not what each would have of one whole batch.
    """
    own = batch_size_of(args, kwargs, plan.batch_dims)
    if group is None:
        return BatchLayout((own,), _parts((own,), plan, follows=follows))
    rows = sample_rows(args, kwargs, plan.batch_dims)
    places = {name: (place.dim, place.outer) for name, place in rows.items()}
    told = [own, zlib.crc32(repr(places).encode()), lengths_mark(args, kwargs, rows), copied]
    every = torch.empty(len(told) * plan.dp, dtype=torch.int64, device="cpu")
    gather_into(every, torch.tensor(told, device="cpu"), group).wait()
    sizes, marks, lengths, copies = every.view(-1, len(told)).T.tolist()
    if any(copies) and len({*zip(sizes, copies, strict=True)}) > 1:
        raise MismatchError(
            "data-parallel ranks are given other numbers of samples of what should be one whole "
            f"batch: these take {sizes} of it; give every rank the same batch"
        )
    if len(set(marks)) > 1:
        raise _read_otherwise(named_tensors(args, kwargs), places, group)
    if copied:
        return BatchLayout((own,), _parts((own,), plan, follows=follows), copies=plan.dp)
    parts = _parts(sizes, plan, follows=follows)
    return BatchLayout(tuple(sizes), parts, dp_rank, alike=len(set(lengths)) == 1)


def dealt_over(layout: BatchLayout, groups: Groups) -> dist.ProcessGroup | None:
    """The dp ranks that have other samples of a batch that lies so; None where each has all."""
    return groups.axis("dp") if len(layout.sizes) > 1 else None


def _parts(sizes: Sequence[int], plan: Plan, *, follows: bool) -> int:
    if not all(sizes):
        raise ConfigError(
            f"the data-parallel ranks are given batches of {list(sizes)} samples; each needs one "
            "at least: leave the batch out, as merakc.dataloader(..., drop_last=True) does, "
            "choose a batch size that leaves a sample for each rank in the last, or give every "
            "rank the whole batch (model.read_whole_batches()), of any number of samples"
        )
    most, common = plan.micro_batches, math.gcd(*sizes)
    if not follows:
        return most
    return max((d for d in range(1, most + 1) if common % d == 0), default=1)


def _read_otherwise(
    named: Mapping[str, torch.Tensor],
    places: Mapping[str, tuple[int, int]],
    group: dist.ProcessGroup,
) -> MismatchError:
    """That the ranks of `group` would read their batches in several ways; collective."""
    own = {n: (list(t.shape), places[n][0] if n in places else None) for n, t in named.items()}
    everyone: list[Any] = [None for _ in range(group.size())]
    dist.all_gather_object(everyone, own, group=group)
    told = []
    for name in dict.fromkeys(name for found in everyone for name in found):
        seen = [found.get(name) for found in everyone]
        if len({place and place[1] for place in seen}) > 1:
            each = ", ".join(
                f"{f'{place[0]} with dim {place[1]}' if place else 'nothing'} on rank {rank}"
                for rank, place in zip(dist.get_process_group_ranks(group), seen, strict=True)
            )
            told.append(f"'{name}' is {each}")
    return MismatchError(
        "the sizes of the batches of the data-parallel ranks say otherwise where the samples stand "
        f"({'; '.join(told)}); say it: auto_parallel(..., batch_dims={{name: dim}}), with None for "
        "a tensor that is the same for all samples"
    )


def may_be_joined(batch: Any, dims: BatchDims) -> bool:
    """Whether the ranks' batches may be parts of one that is read by `dims`: what these take to be
    the same for all samples is the same on all ranks. Collective.
    """
    args, kwargs = call_arguments(batch)
    named, sampled = named_tensors(args, kwargs), sample_rows(args, kwargs, dims)
    own = {n: content_hash(t) for n, t in named.items() if t.dim() and n not in sampled}
    told = together(lambda: sorted(own.items()) if named else None)
    return len({str(one) for one in told if one is not None}) == 1

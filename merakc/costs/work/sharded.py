"""Bytes of a stage's state on one rank, from its buckets (Rajbhandari et al., "ZeRO", 2020).

With P trained parameters in s_p, s_g and s_os shards, of c bytes as they are computed with, g bytes
of a gradient and m bytes as they are optimized, a rank keeps P c / s_p of parameters, P m / s_os of
masters where the two differ, and as much for each number that the optimizer keeps. While
micro-batches run it adds up P g / s_g of gradients; in the end it has P m / s_os of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch

from merakc.analysis.aliases import last_uses
from merakc.analysis.buckets import BucketSpec, Held, ahead, plan_buckets
from merakc.analysis.liveness import owners
from merakc.costs.work.memory import Sum
from merakc.ir.graph import Graph, InputKind, Ref
from merakc.ir.offload import NOWHERE, OnHost
from merakc.ir.precision import Precision, kept_dtype
from merakc.ir.state import StateShards

# Adam and AdamW keep two numbers a parameter, beside the parameter and its gradient.
OPTIMIZER_STATES = 2
LEAVING = 2  # buckets of gradients at a time, of those that leave: gradients come in turns


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What a rank holds of a stage's buckets.

    `kept_bytes` are there all the time: masters, optimizer state and the `parameter_bytes` that are
    computed with. `gathered_bytes` are whole parameters, `summed_bytes` what the gradients of
    micro-batches are added up in, and `filling_bytes` a bucket of whole gradients that are
    scattered when the last is there, and those that leave then. In the end `reduced_bytes` of
    gradients stand in the place of those two. `host_bytes` are beside the device: what is updated
    there, what the optimizer keeps of it, and its reduced gradients, which are nowhere else; what
    is fetched from there.
    """

    kept_bytes: int
    parameter_bytes: int
    gathered_bytes: int
    summed_bytes: int
    filling_bytes: int
    reduced_bytes: int
    host_bytes: int = 0


def state_bytes(
    buckets: Iterable[BucketSpec],
    precision: Precision | None = None,
    *,
    one: bool = False,
    read_bytes: int = 0,
) -> StateBytes:
    """The bytes of these buckets, shards rounded up, in a step of `one` micro-batch or of more,
    where a graph has `read_bytes` of parameters in use at once.
    """
    buckets = tuple(buckets)
    kept = parameters = summed = filling = reduced = host = 0
    gathered: list[tuple[int, bool]] = []
    leaving: dict[bool, list[int]] = {False: [], True: []}
    for spec in buckets:
        shards, numel = spec.shards, spec.numel
        mixed = precision if spec.is_trained else None
        computed = mixed.dtype("compute") if mixed else spec.dtype
        gradient = mixed.dtype("gradients") if mixed else spec.dtype
        own = computed.itemsize * -(-numel // shards.parameters)
        if spec.is_gathered:
            gathered.append((computed.itemsize * numel, len(spec.members) > 1))
        if not spec.fetched:
            parameters += own
        elif mixed is not None or not spec.is_trained:  # otherwise what is updated is read
            host += own
        if not spec.is_trained:
            continue
        owned = spec.dtype.itemsize * -(-numel // shards.optimizer)
        if spec.on_host:
            host += (OPTIMIZER_STATES + 2) * owned
        else:
            kept += (OPTIMIZER_STATES + (mixed is not None)) * owned
            reduced += owned
        if leaves_at_once(spec, one=one):
            leaving[spec.fetched].append(gradient.itemsize * numel)
            continue
        summed += gradient.itemsize * -(-numel // shards.gradients)
        if shards.gradients > 1:
            filling = max(filling, gradient.itemsize * numel)
    whole = whole_bytes(gathered, read_bytes, ahead(buckets))
    filling += sum(sum(sorted(sizes)[-LEAVING:]) for sizes in leaving.values())
    return StateBytes(kept + parameters, parameters, whole, summed, filling, reduced, host)


def whole_bytes(gathered: Iterable[tuple[int, bool]], read_bytes: int = 0, ahead: int = 1) -> int:
    """What is there at once of buckets that are gathered, of which each has so many bytes, and
    several parameters or one: the largest, the one that is read and those `ahead`; or what a graph
    has in use, of the first and the last bucket of it more than that, and those ahead.
    """
    sizes = [size for size, _ in gathered]
    joined = max((size for size, has_several in gathered if has_several), default=0)
    ahead_bytes = ahead * min(max(sizes, default=0), read_bytes)
    most = sum(sorted(sizes)[-1 - ahead :])
    return max(most, min(read_bytes + joined + ahead_bytes, sum(sizes)))


def leaves_at_once(spec: BucketSpec, *, one: bool) -> bool:
    """Whether the gradients of a bucket are nowhere on the device once they are reduced, and that
    is as soon as they are made; those of several stages are added up first.
    """
    return one and spec.on_host and len(spec.stages) == 1


def graph_state_bytes(
    graph: Graph,
    shards: StateShards,
    precision: Precision | None = None,
    others: Mapping[str, StateShards] = MappingProxyType({}),
    on_host: OnHost = NOWHERE,
    read_bytes: int = 0,
) -> StateBytes:
    """The same of all parameters of a stage's graph, of which some are in `others` than its
    shards.
    """
    if not others and not on_host and not read_bytes:
        return _like_state_bytes(graph.told(_parameters), shards, precision)
    kinds = [shards, *dict.fromkeys(others.values())]
    updated, kept = set(on_host.updated), set(on_host.kept)
    held = [
        Held(
            i.target,
            kept_dtype(i.spec.dtype, precision, is_trained=i.requires_grad),
            i.spec.numel,
            (kinds.index(others[i.target], 1) if i.target in others else 0,),
            i.requires_grad,
            on_host=i.target in updated,
            fetched=i.target in kept,
        )
        for i in graph.inputs
        if i.kind is InputKind.PARAMETER
    ]
    return state_bytes(
        plan_buckets(held, kinds.__getitem__), precision, one=on_host.one, read_bytes=read_bytes
    )


def read_at_once(graph: Graph) -> int:
    """The most bytes of parameters that are in use at once, from their first reader in a graph to
    their last: those of a block that its backward makes again.
    """
    last = last_uses(graph, owners(graph))
    sizes = {Ref(i.name): i.spec.size_bytes for i in graph.inputs if i.kind is InputKind.PARAMETER}
    unread, ends = set(sizes), Counter[int]()
    now = most = 0
    for k, node in enumerate(graph.nodes):
        for ref in unread.intersection(node.refs):
            now += sizes[ref]
            ends[last[ref]] += sizes[ref]
            unread.discard(ref)
        most = max(most, now)
        now -= ends[k]
    return most


def _parameters(graph: Graph) -> tuple[tuple[torch.dtype, int, bool], ...]:
    """What the state of a stage depends on."""
    inputs = (i for i in graph.inputs if i.kind is InputKind.PARAMETER)
    return tuple((i.spec.dtype, i.spec.numel, i.requires_grad) for i in inputs)


@lru_cache(maxsize=4096)
def _like_state_bytes(
    parameters: tuple[tuple[torch.dtype, int, bool], ...],
    shards: StateShards,
    precision: Precision | None,
) -> StateBytes:
    """Of stages whose parameters are of these sizes, in this order."""
    held = [
        Held(str(k), kept_dtype(dtype, precision, is_trained=trained), numel, (0,), trained)
        for k, (dtype, numel, trained) in enumerate(parameters)
    ]
    return state_bytes(plan_buckets(held, lambda _: shards), precision)


@dataclass(frozen=True, slots=True)
class SunkGradients:
    """The gradients of a stage that go into its buckets as they are made.

    They are added to `sums`. Where these are scattered, or leave for the host, `scattered_bytes` is
    what is left of them between micro-batches. `reduced_bytes` stand in the place of all in the
    end, shared parameters' among them.
    """

    sums: tuple[Sum, ...]
    scattered_bytes: int
    reduced_bytes: int

    @property
    def held_bytes(self) -> int:
        """What is there between two micro-batches."""
        return self.scattered_bytes + sum(s.size_bytes for s in self.sums if not s.is_scattered)


def _reducing_bytes(spec: BucketSpec, gradient: torch.dtype) -> int:
    """What the reduction of a bucket takes beside its gradients: as much again for other ranks'
    parts of them, where they are scattered, or all of them in float32.
    """
    if spec.shards.optimizer > 1:
        return gradient.itemsize * spec.numel
    reduced = torch.promote_types(gradient, torch.float32)
    return reduced.itemsize * spec.numel if reduced != gradient else 0


def sunk_gradients(
    buckets: Iterable[BucketSpec],
    stages: Collection[int],
    precision: Precision | None = None,
    *,
    one: bool = False,
) -> dict[int, SunkGradients]:
    """Those of a rank, by its `stages`, in a step of `one` micro-batch or of more; shared
    parameters' are added up whole, and reduced last.
    """
    of_stage: dict[int, list[BucketSpec]] = {}
    for spec in buckets:
        if spec.is_trained:
            stage = min(s for s in spec.stages if s in stages)
            of_stage.setdefault(stage, []).append(spec)
    found = {}
    for stage, specs in of_stage.items():
        own = [spec for spec in specs if not spec.is_shared]
        sums = []
        for spec in own:
            dtype = precision.dtype("gradients") if precision else spec.dtype
            size_bytes = dtype.itemsize * spec.numel
            is_scattered = spec.shards.gradients > 1 or leaves_at_once(spec, one=one)
            reducing_bytes = _reducing_bytes(spec, dtype)
            sums.append(Sum(frozenset(spec.members), size_bytes, is_scattered, reducing_bytes))
        scattered = [s for s in own if s.shards.gradients > 1]
        found[stage] = SunkGradients(
            tuple(sums),
            state_bytes(scattered, precision).summed_bytes,
            state_bytes(specs, precision).reduced_bytes,
        )
    return found

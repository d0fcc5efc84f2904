"""From the op name of a graph's node to what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from merakc.kernels import (
    attention,
    buffers,
    checks,
    collectives,
    draws,
    exchange,
    experts,
    gemm,
    host,
    opaque,
    products,
    ragged,
    scores,
    vocabulary,
)
from merakc.kernels.bindings import BINDINGS
from merakc.kernels.float8 import scaled
from merakc.kernels.ring import attention as ring
from merakc.kernels.ring import swap


def gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
    """`x`, of which every tp rank has all of `dim`."""
    return x


# Ops of ours that are Python functions over other ops; make_fx traces through them.
COMPOSITES: Mapping[str, Callable[..., Any]] = {
    "composite.gathered": gathered,
    "composite.linear_cross_entropy": vocabulary.linear_cross_entropy,
    "composite.vocab_parallel_embedding": vocabulary.vocab_parallel_embedding,
    "composite.vocab_parallel_cross_entropy": vocabulary.vocab_parallel_cross_entropy,
}


# Collectives in two halves, which the compiler puts in the place of an op: the first returns a
# `collectives.Pending`, the second its result.
STARTS: Mapping[str, str] = {
    "merakc.all_reduce.default": "start.all_reduce",
    "merakc.all_gather.default": "start.all_gather",
    "merakc.gather_to.default": "start.gather_to",
    "merakc.reduce_scatter.default": "start.reduce_scatter",
    "merakc.dispatch.default": "start.dispatch",
    "merakc.combine.default": "start.combine",
    "merakc.exchange.default": "start.exchange",
    "merakc.swap.default": "start.swap",
}
STARTED: Mapping[str, str] = {start: op for op, start in STARTS.items()}
WAIT = "wait.default"
# Moves to the host and back, which the compiler puts around values: the start of one out and its
# end, what stays of a value of which a part moves, and the start of one back, which `WAIT` ends.
OUT, GONE, REST, BACK = "host.out", "host.gone", "host.rest", "host.back"
# How ops begin that a graph's own `functions` run, each returning a sequence: calls made one.
FUSED = "fused."
_HALVES: Mapping[str, Callable[..., Any]] = {
    "start.all_reduce": collectives.start_all_reduce,
    "start.all_gather": collectives.start_all_gather,
    "start.gather_to": collectives.start_all_gather,
    "start.reduce_scatter": collectives.start_reduce_scatter,
    "start.dispatch": experts.start_dispatch,
    "start.combine": experts.start_combine,
    "start.exchange": exchange.start_exchange,
    "start.swap": swap.start_swap,
    WAIT: collectives.wait,
    OUT: host.start_out,
    GONE: host.moved_out,
    REST: host.rest_of,
    BACK: host.start_back,
}


def _group_norm(x: torch.Tensor, *args: Any) -> Any:
    return torch.ops.aten.native_group_norm(x.contiguous(), *args)


def _group_norm_backward(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
    return torch.ops.aten.native_group_norm_backward(grad.contiguous(), x.contiguous(), *args)


# What a compiled step calls in place of an op: the same, past the dispatcher and autograd.
DIRECT: Mapping[str, Callable[..., Any]] = {
    "merakc.addmm.default": gemm.addmm,
    "merakc.all_reduce.default": collectives.all_reduce_now,
    "merakc.attention.default": attention.attention_now,
    "merakc.attention_backward.default": attention.attention_backward_now,
    "merakc.dropout.default": draws.dropout_now,
    "merakc.linear.default": gemm.linear,
    "merakc.mm.default": gemm.mm,
    "merakc.opaque.default": opaque.opaque,
    "merakc.scores.default": scores.scores,
    "merakc.scores_backward.default": scores.scores_backward,
    "merakc.opaque_backward.default": opaque.opaque_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
}
# imported for the ops that they register
REGISTERED = (
    attention, buffers, checks, collectives, draws, exchange, experts, gemm, host, opaque,
    products, ring, scaled, scores, swap,
)  # fmt: skip


def resolve_op(op: str) -> Callable[..., Any]:
    """The callable of `aten.add.Tensor`, `merakc.dropout.default`, `composite.NAME`."""
    if op in COMPOSITES:
        return COMPOSITES[op]
    if op in _HALVES:
        return _HALVES[op]
    if op in ragged.CALLS:
        return ragged.CALLS[op]
    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part)
    call: Callable[..., Any] = found
    return call


def compiled_call(op: str) -> Callable[..., Any]:
    """What a compiled step calls for an op, the shortest way there is."""
    found = DIRECT.get(op) or BINDINGS.get(op)
    if found is not None:
        return found
    call = resolve_op(op)
    short: Callable[..., Any] = getattr(call, "_op", call)  # what an `OpOverload` hands on to
    return short


def uses_autograd(op: str) -> bool:
    """Whether what runs an op may differentiate something itself. Ops that users register may."""
    own = op.startswith(("merakc.", "start.", "host.")) and not op.startswith("merakc.opaque")
    return not (own or op == WAIT or op.startswith("aten."))


@cache
def makes_tensor(op: str) -> bool:
    """Whether the op takes a device and no tensor: where its result lives must be said."""
    if not op.startswith("aten."):
        return False
    arguments = resolve_op(op)._schema.arguments  # type: ignore[attr-defined]
    tensors = any("Tensor" in str(a.type) for a in arguments)
    return not tensors and any(a.name == "device" for a in arguments)


@cache
def returns_list(op: str) -> bool:
    """Whether the op returns a list of tensors."""
    if op in _HALVES:
        return False
    returns = resolve_op(op)._schema.returns  # type: ignore[attr-defined]
    return len(returns) == 1 and str(returns[0].type).startswith("List")


@cache
def returns_view(op: str) -> bool:
    """Whether the op's result may share its argument's memory."""
    # Compiled graphs reshape in place of `_unsafe_view`, whatever its schema says (`BINDINGS`).
    if op in COMPOSITES or op.startswith("function.") or op == "aten._unsafe_view.default":
        return True
    if op in _HALVES:
        return False
    returns = resolve_op(op)._schema.returns  # type: ignore[attr-defined]
    return any(r.alias_info is not None for r in returns)


@cache
def is_pointwise(op: str) -> bool:
    """Whether the op computes each element for itself and draws no numbers: casts, and what torch
    says so of.
    """
    if op == "aten._to_copy.default":
        return True
    tags = resolve_op(op).tags if op.startswith("aten.") else ()  # type: ignore[attr-defined]
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags

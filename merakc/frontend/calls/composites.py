"""Composite ops that are taken apart here, because torch's own way of it does not fit a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

RESIZING = ("aten.upsample_", "aten._upsample_")


def part_by_part(op: str, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What computes the same as the composite op `op` called with `args`, in plain ops; or None."""
    if op.startswith("aten.adaptive_avg_pool") and all(size == 1 for size in args[1]):
        return _mean_pool
    if op.startswith(RESIZING) and op.endswith(".vec"):
        return functools.partial(_resized, op.split(".")[1])
    if op == "aten.cosine_similarity.default":
        return _cosine_similarity
    if op in CHECKING:
        return CHECKING[op]
    if op in RECURRENT and args[4] > 1 and args[5] > 0.0 and args[6]:
        return RECURRENT[op]
    return None


def _mean_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Adaptive average pooling of the last dims to size 1: torch's changes its strides in place."""
    return x.mean([-k for k in range(len(output_size), 0, -1)], keepdim=True)


def _resized(name: str, x: Tensor, output_size: Sequence[int] | None, *rest: Any) -> Tensor:
    """`F.interpolate` by the op that it is in eager: torch's decomposition gathers the neighbours
    of each pixel by indices, and adds gradients up by them.

    `x` is [n, c, *]; `rest` are the op's own options, and last the factors of its dims or None.
    """
    *options, factors = rest
    sizes = x.shape[2:]
    if output_size is None:
        output_size = [int(n * f) for n, f in zip(sizes, factors, strict=True)]
    resize = getattr(torch.ops.aten, name).default
    out: Tensor = resize(x, output_size, *options, *(factors or [None] * len(sizes)))
    return out


def _cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """`F.cosine_similarity`, in which torch clamps the norms in place, unseen by autograd."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    found = []
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    for part in (x.to(dtype).expand(shape), y.to(dtype).expand(shape)):
        norm = torch.linalg.vector_norm(part, dim=dim, keepdim=True)
        found.append(part / (norm + (norm.clamp_min(eps) - norm).detach()))
    out: Tensor = (found[0] * found[1]).sum(dim)
    return out


# Checks of values that torch's own code of these ops leaves out on fake tensors: of `one_hot` in
# torch 2.11, of matrices in all.


def _one_hot(classes: Tensor, num_classes: int = -1) -> Tensor:
    """`F.one_hot`, which looks at its classes in kernels alone."""
    if classes.dtype != torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    torch._assert_async((classes >= 0).all())
    if num_classes == -1:
        num_classes = int(classes.max().item()) + 1
    else:
        torch._assert_async((classes < num_classes).all())
    one = torch.arange(num_classes, device=classes.device)
    return (classes.unsqueeze(-1) == one).to(torch.int64)


def _matrices_are_fine(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """What `torch.linalg` raises for a matrix without an inverse, or without a factor."""
    torch._assert_async((info == 0).all())


CHECKING: dict[str, Callable[..., Any]] = {
    "aten.one_hot.default": _one_hot,
    "aten._linalg_check_errors.default": _matrices_are_fine,
}


# torch's decompositions (2.13) of recurrent ops leave out the dropout between their layers.


def _layers(
    run: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    layers: int,
    directions: int,
    dropout: float,
) -> tuple[Tensor, ...]:
    """Runs a stack layer by layer, `run(x, states, params)`, with dropout between.

    `states` are [layers * directions, batch, hidden]; returns the output and the last states.
    """
    each = len(params) // layers
    last: list[Sequence[Tensor]] = []
    for layer in range(layers):
        own = [s[layer * directions : (layer + 1) * directions] for s in states]
        x, *after = run(x, own, params[layer * each : (layer + 1) * each])
        last.append(after)
        if layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    return x, *(torch.cat(parts) for parts in zip(*last, strict=True))


def _one_by_one(op: Any) -> Callable[..., Any]:
    """The layers of `op(x, states, params, has_biases, layers, dropout, train, ...)`."""

    def call(
        x: Tensor,
        states: Any,
        params: Sequence[Tensor],
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        single = isinstance(states, Tensor)

        def run(x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor]) -> Any:
            given = states[0] if single else states
            return op(x, given, params, biases, 1, 0.0, train, bidirectional, batch_first)

        all_states = [states] if single else states
        return _layers(
            run,
            x,
            all_states,
            params=params,
            layers=layers,
            directions=1 + bidirectional,
            dropout=dropout,
        )

    return call


RECURRENT: dict[str, Callable[..., Any]] = {
    f"aten.{name}.input": _one_by_one(getattr(torch.ops.aten, name).input)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}

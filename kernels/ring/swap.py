"""`merakc::swap`: the last rows of a rank for those of the rank as far from the other end.

Backward: the swap of the gradients, which brings them back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from merakc.kernels.collectives import Pending
from merakc.kernels.exchange import start_all_to_all

SWAP = "merakc.swap.default"


def swap(
    x: Tensor, axis: str, dim: int, stay: Sequence[int], go: Sequence[int], rank: int
) -> Tensor:
    """The first `stay[rank]` rows of dim `dim`, and behind them the last `go[k]` of rank k, of n
    that is n - 1 - rank, which has the last of this one.
    """
    out: Tensor = torch.ops.merakc.swap(x, axis, dim, stay, go, rank)
    return out


def start_swap(
    x: Tensor, axis: str, dim: int, stay: Sequence[int], go: Sequence[int], rank: int
) -> Pending:
    """Starts what `merakc::swap` computes."""
    assert x.shape[dim] == stay[rank] + go[rank], (x.shape, dim, stay, go, rank)
    out, other = _fake(x, axis, dim, stay, go, rank), len(go) - 1 - rank
    out.narrow(dim, 0, stay[rank]).copy_(x.narrow(dim, 0, stay[rank]))
    sent = x.narrow(dim, stay[rank], go[rank]).contiguous()
    shape = [*x.shape[:dim], go[other], *x.shape[dim + 1 :]]
    received = x.new_empty(math.prod(shape))
    ranks = range(len(go))
    here, away = ([x.numel() if k == other else 0 for k in ranks] for x in (received, sent))

    def finish() -> Tensor:
        out.narrow(dim, stay[rank], go[other]).copy_(received.view(shape))
        return out

    return start_all_to_all(axis, received, sent.view(-1), here, away, finish)


# Registration


def _fake(
    x: Tensor, axis: str, dim: int, stay: Sequence[int], go: Sequence[int], rank: int
) -> Tensor:
    rows = stay[rank] + go[len(go) - 1 - rank]
    return x.new_empty([*x.shape[:dim], rows, *x.shape[dim + 1 :]])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.rest = inputs


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    axis, dim, stay, go, rank = ctx.rest
    return swap(grad, axis, dim, stay, [*reversed(go)], rank), None, None, None, None, None


torch.library.define(
    "merakc::swap", "(Tensor x, str axis, int dim, int[] stay, int[] go, int rank) -> Tensor"
)
torch.library.impl("merakc::swap", "default", lambda *args: start_swap(*args).wait())
torch.library.register_fake("merakc::swap", _fake)
torch.library.register_autograd("merakc::swap", _differentiate, setup_context=_save)

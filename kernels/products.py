"""Products and the collective beside them in one op: all-gather then products, product then
reduce-scatter.

Where the ranks of an axis read each other's memory, torch pipelines the two: a rank multiplies what
it has of one rank while it copies what it needs of the next (`torch.ops.symm_mem`, Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023). Elsewhere the
collective and the products run one after the other. `merakc::gather_matmul` and
`merakc::matmul_scatter` are each other's backward, so that differentiated graphs have them too.

Legend of shapes: i and o width before and behind. A weight is [i, o], or [o, i] where it is
`turned`, as that of a linear layer.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from merakc.kernels.collectives import (
    all_gather,
    axis_group,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)

# What torch's own tests of symmetric memory ask for (test/distributed/test_symmetric_memory.py).
LEAST_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_symmetric: dict[str, bool] = {}  # what was found of groups, by their names


def gather_matmul(
    x: Tensor, weights: Sequence[Tensor], turned: bool, axis: str, dim: int,
    sizes: Sequence[int], rank: int,
) -> list[Tensor]:  # fmt: skip
    """Every rank's x [..., i], concatenated along `dim`, and its product with each weight.

    `dim` is none of the last. Ranks go on with different products, as behind
    `merakc.kernels.collectives.gather_to`; `sizes` and `rank` are as there.
    """
    found: list[Tensor] = torch.ops.merakc.gather_matmul(
        x, list(weights), turned, axis, dim, sizes, rank
    )
    return found


def matmul_scatter(
    x: Tensor, weight: Tensor, turned: bool, axis: str, dim: int, sizes: Sequence[int], rank: int
) -> Tensor:
    """This rank's slice along `dim` of the sum of every rank's product of x [..., i] and weight.

    `dim` is none of the last; `sizes` and `rank` as of `merakc.kernels.collectives`.
    """
    out: Tensor = torch.ops.merakc.matmul_scatter(x, weight, turned, axis, dim, sizes, rank)
    return out


def has_symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks of a group read each other's memory; found out once, by all of them
    together.

    They do on GPUs of one host of which torch can map the memory of each for the others. No torch
    of 2.11 and later asks that a group be enabled first.
    """
    name = group.group_name
    if name not in _symmetric:
        _symmetric[name] = _find_symmetric_memory(group, device)
    return _symmetric[name]


def _find_symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    able = torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    facts: list[tuple[str, bool] | None] = [None] * group.size()
    dist.all_gather_object(facts, (socket.gethostname(), able), group)
    if len(set(facts)) > 1 or not able:
        return False
    from torch.distributed._symmetric_memory import get_symm_mem_workspace

    try:
        get_symm_mem_workspace(group.group_name, min_size=1)
    except RuntimeError:  # no links that memory can be mapped over
        able = False
    flag = torch.tensor([able], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group)
    return bool(flag.item())


def pipelines(x: Tensor, axis: str, sizes: Sequence[int]) -> bool:
    """Whether torch pipelines products of x with collectives over `axis`; the same on all ranks."""
    if x.device.type != "cuda" or x.dtype not in DTYPES or len(set(sizes)) > 1:
        return False
    return has_symmetric_memory(axis_group(axis), x.device)


def _gather_matmul(
    x: Tensor, weights: Sequence[Tensor], turned: bool, axis: str, dim: int,
    sizes: Sequence[int], rank: int,
) -> list[Tensor]:  # fmt: skip
    right = [w.t() if turned else w for w in weights]
    if pipelines(x, axis, sizes):
        name = axis_group(axis).group_name
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        whole, outs = fused(x.contiguous(), right, dim, name)
        return [out.contiguous() for out in (whole, *outs)]
    whole = start_all_gather(x, axis, dim, sizes, rank).wait()
    return [whole, *(torch.matmul(whole, w) for w in right)]


def _matmul_scatter(
    x: Tensor, weight: Tensor, turned: bool, axis: str, dim: int, sizes: Sequence[int], rank: int
) -> Tensor:
    right = weight.t() if turned else weight
    if pipelines(x, axis, sizes):
        name = axis_group(axis).group_name
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        out: Tensor = fused(x.contiguous(), right, "sum", dim, name)
        return out.contiguous()
    return start_reduce_scatter(torch.matmul(x, right), axis, dim, sizes, rank).wait()


# Registration


def _width(weight: Tensor, turned: bool) -> int:
    return weight.shape[0 if turned else 1]


def _fake_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], turned: bool, axis: str, dim: int,
    sizes: Sequence[int], rank: int,
) -> list[Tensor]:  # fmt: skip
    assert 0 <= dim < x.dim() - 1, (x.shape, dim)
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return [x.new_empty(shape), *(x.new_empty([*shape[:-1], _width(w, turned)]) for w in weights)]


def _fake_matmul_scatter(
    x: Tensor, weight: Tensor, turned: bool, axis: str, dim: int, sizes: Sequence[int], rank: int
) -> Tensor:
    assert 0 <= dim < x.dim() - 1, (x.shape, dim)
    shape = [*x.shape[:-1], _width(weight, turned)]
    shape[dim] = sizes[rank]
    return x.new_empty(shape)


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], *inputs[1])
    ctx.turned, ctx.place = inputs[2], inputs[3:]


def _differentiate_gather(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    of_whole, *of_outs = grads
    of_x = None
    if ctx.needs_input_grad[0]:
        known = [(g, w) for g, w in zip(of_outs, weights, strict=True) if g is not None]
        of_x = _gradient_of_part(of_whole, known, ctx.turned, ctx.place)
    of_weights = [
        _gradient_of_weight(x, grad, ctx.turned) if needed and grad is not None else None
        for grad, needed in zip(of_outs, ctx.needs_input_grad[1], strict=True)
    ]
    return of_x, of_weights, None, None, None, None, None


def _gradient_of_part(
    of_whole: Tensor | None, known: Sequence[tuple[Tensor, Tensor]], turned: bool, place: Any
) -> Tensor | None:
    """The gradient of what was gathered, from that of the whole and those of products.

    The products with several weights are one, with a sum as long as those of all together.
    """
    if not known:
        return None if of_whole is None else reduce_scatter(of_whole, *place)
    (grad, weight), *more = known
    if more:
        grad = torch.cat([g for g, _ in known], -1)
        weight = torch.cat([w for _, w in known], 0 if turned else 1)
    if of_whole is None:
        return matmul_scatter(grad, weight, not turned, *place)
    product = torch.matmul(grad, weight if turned else weight.t())
    return reduce_scatter(product + of_whole, *place)


def _gradient_of_weight(x: Tensor, grad: Tensor, turned: bool) -> Tensor:
    rows, of_rows = x.flatten(0, -2), grad.flatten(0, -2)
    return of_rows.t() @ rows if turned else rows.t() @ of_rows


def _save_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.turned, ctx.place = inputs[2], inputs[3:]


def _differentiate_scatter(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        whole, of_x = gather_matmul(grad, [weight], not ctx.turned, *ctx.place)
    else:
        whole = all_gather(grad, *ctx.place)
    if ctx.needs_input_grad[1]:
        of_weight = _gradient_of_weight(x, whole, ctx.turned)
    return of_x, of_weight, None, None, None, None, None


_PLACE = "bool turned, str axis, int dim, int[] sizes, int rank"
torch.library.define("merakc::gather_matmul", f"(Tensor x, Tensor[] weights, {_PLACE}) -> Tensor[]")
torch.library.define("merakc::matmul_scatter", f"(Tensor x, Tensor weight, {_PLACE}) -> Tensor")
torch.library.impl("merakc::gather_matmul", "default", _gather_matmul)
torch.library.impl("merakc::matmul_scatter", "default", _matmul_scatter)
torch.library.register_fake("merakc::gather_matmul", _fake_gather_matmul)
torch.library.register_fake("merakc::matmul_scatter", _fake_matmul_scatter)
torch.library.register_autograd(
    "merakc::gather_matmul", _differentiate_gather, setup_context=_save_gather
)
torch.library.register_autograd(
    "merakc::matmul_scatter", _differentiate_scatter, setup_context=_save_scatter
)

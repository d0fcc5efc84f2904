"""One call, or several, of every op of the table of sharding rules: random sizes, real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from merakc.kernels import opaque

Pick = Callable[[int, int], int]
Call = tuple[Any, ...]
"""Positional arguments; a dict at the end holds those given by name."""
NOTED = opaque.Call(list, ())  # of numbers that say which experts have rows
KEYS = torch.tensor(3), torch.tensor(40)  # of random numbers: the seed and the first sample


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def picked(op: str, pick: Pick) -> Call:
    """The arguments of one call; a dict at the end holds those given by name."""
    b, m, n, i = (pick(2, 7) for _ in range(4))
    if op in OF_ONE:
        return (randn(b, m, n), *OF_ONE[op](pick))
    if op in SPATIAL:
        sizes = [pick(4, 7) for _ in range(SPATIAL[op][0])]
        return (randn(b, m, *sizes), *SPATIAL[op][1](sizes))
    return CALLS[op](pick, b, m, n, i)


# Ops of one tensor [b, m, n]: what comes behind it.
OF_ONE: dict[str, Callable[[Pick], Call]] = {
    "aten.sum.default": lambda pick: (),
    "aten.sum.dim_IntList": lambda pick: ((pick(0, 1), -1), bool(pick(0, 1))),
    "aten.mean.default": lambda pick: (),
    "aten.mean.dim": lambda pick: ((pick(0, 2),), bool(pick(0, 1))),
    "aten.amax.default": lambda pick: ((pick(0, 2),), bool(pick(0, 1))),
    "aten.amin.default": lambda pick: ((pick(0, 2),), bool(pick(0, 1))),
    "aten.var_mean.correction": lambda pick: ((pick(0, 2),),),
    "aten.var.correction": lambda pick: ((pick(0, 2),),),
    "aten.max.dim": lambda pick: (pick(0, 2), bool(pick(0, 1))),
    "aten.logsumexp.default": lambda pick: ((pick(0, 2),), bool(pick(0, 1))),
    "aten.argmax.default": lambda pick: (pick(0, 2), bool(pick(0, 1))),
    "aten.argmin.default": lambda pick: (pick(0, 2), bool(pick(0, 1))),
    "aten.softmax.int": lambda pick: (pick(-3, 2),),
    "aten.log_softmax.int": lambda pick: (pick(-3, 2),),
    "aten.cumsum.default": lambda pick: (pick(0, 2),),
    "aten.sort.default": lambda pick: (pick(0, 2),),
    "aten.flip.default": lambda pick: ((0, pick(1, 2)),),
    "aten.linalg_vector_norm.default": lambda pick: (),
    "aten.transpose.int": lambda pick: (pick(0, 2), pick(-3, -1)),
    "aten.permute.default": lambda pick: ((2, 0, 1),),
    "aten.unsqueeze.default": lambda pick: (pick(-4, 3),),
    "aten.unbind.int": lambda pick: (pick(0, 2),),
    "aten.select.int": lambda pick: (pick(-3, 2), pick(0, 1)),
    "aten.slice.Tensor": lambda pick: (pick(0, 2), 1, 9),
    "aten.constant_pad_nd.default": lambda pick: ((1, pick(-1, 2)), 0.5),
    "aten.new_ones.default": lambda pick: ((4, pick(2, 6)),),
    "aten.new_zeros.default": lambda pick: ((pick(2, 6),),),
    "aten.new_full.default": lambda pick: ((pick(2, 6),), 2.5),
    "aten.to.dtype": lambda pick: (torch.float64,),
    "aten.contiguous.default": lambda pick: (),
    "aten.clone.default": lambda pick: (),
    "aten.detach.default": lambda pick: (),
    "aten.alias.default": lambda pick: (),
    "aten.fill.Scalar": lambda pick: (2.0,),
    "aten.full_like.default": lambda pick: (2.0,),
    "aten.zeros_like.default": lambda pick: (),
    "aten.ones_like.default": lambda pick: (),
    "aten.nansum.default": lambda pick: ((pick(0, 2),),),
    "aten.prod.default": lambda pick: (),
    "aten.prod.dim_int": lambda pick: (pick(0, 2), bool(pick(0, 1))),
    "aten.any.default": lambda pick: (),
    "aten.any.dim": lambda pick: (pick(0, 2),),
    "aten.any.dims": lambda pick: ((0, pick(1, 2)),),
    "aten.all.default": lambda pick: (),
    "aten.all.dim": lambda pick: (pick(0, 2),),
    "aten.all.dims": lambda pick: ((0, pick(1, 2)),),
    "aten.max.default": lambda pick: (),
    "aten.min.default": lambda pick: (),
    "aten.min.dim": lambda pick: (pick(0, 2), bool(pick(0, 1))),
    "aten.aminmax.default": lambda pick: ({"dim": pick(0, 2)} if pick(0, 1) else {},),
    "aten.std.correction": lambda pick: ((pick(0, 2),), {"keepdim": bool(pick(0, 1))}),
    "aten.std_mean.correction": lambda pick: ((pick(0, 2),),),
    "aten.norm.Scalar": lambda pick: (),
    "aten.norm.ScalarOpt_dim": lambda pick: (2, (pick(0, 2),)),
    "aten.median.default": lambda pick: (),
    "aten.median.dim": lambda pick: (pick(0, 2),),
    "aten.nanmedian.default": lambda pick: (),
    "aten.nanmedian.dim": lambda pick: (pick(0, 2),),
    "aten.mode.default": lambda pick: (pick(0, 2),),
    "aten.kthvalue.default": lambda pick: (2, pick(0, 2)),
    "aten._softmax.default": lambda pick: (pick(-3, 2), False),
    "aten._log_softmax.default": lambda pick: (pick(-3, 2), False),
    "aten._safe_softmax.default": lambda pick: (pick(-3, 2),),
    "aten.cumprod.default": lambda pick: (pick(0, 2),),
    "aten.cummax.default": lambda pick: (pick(0, 2),),
    "aten.cummin.default": lambda pick: (pick(0, 2),),
    "aten.logcumsumexp.default": lambda pick: (pick(0, 2),),
    "aten.sort.stable": lambda pick: ({"stable": True, "dim": pick(0, 2)},),
    "aten.topk.default": lambda pick: (2, pick(-3, 2)),
    "aten._fft_r2c.default": lambda pick: ((pick(0, 2),), 0, bool(pick(0, 1))),
    "aten.roll.default": lambda pick: ((1,), (pick(0, 2),)) if pick(0, 1) else ((2,),),
    "aten.tril.default": lambda pick: (pick(-1, 1),),
    "aten.triu.default": lambda pick: (pick(-1, 1),),
    "aten.repeat.default": lambda pick: ((pick(1, 3), 1, pick(1, 4), pick(1, 2)),),
    "aten.diagonal.default": lambda pick: (pick(0, 1), pick(0, 1), 2),
    "aten.unfold.default": lambda pick: (pick(0, 2), 2, 1),
    "aten.new_empty.default": lambda pick: ((4, pick(2, 6)),),
    "aten.new_empty_strided.default": lambda pick: ((4, 3), (3, 1)),
    "aten.log_sigmoid_forward.default": lambda pick: (),
    "aten.bucketize.Tensor": lambda pick: (torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64),),
    "aten.floor_divide.Scalar": lambda pick: (0.3,),
    "aten.hardswish.default": lambda pick: (),
    # elementwise, without a row
    "aten.gelu.default": lambda pick: (),
    "aten.pow.Tensor_Scalar": lambda pick: (2,),
}  # fmt: skip


def _heads(pick: Pick) -> tuple[int, int, int]:
    groups = pick(1, 4)
    return groups * pick(1, 3), groups, 2 * pick(1, 2)


def _attention(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    heads, groups, width = _heads(pick)
    mask = torch.rand(b, 1, m, n) > 0.2 if pick(0, 1) else None
    q, k, v = randn(b, heads, m, width), randn(b, groups, n, width), randn(b, groups, n, i)
    return q, k, v, mask, False, 0.7


def _embedding(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    return randn(m, i), torch.randint(m, (b, n)), pick(-1, m - 1)


def _cross_entropy(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    target = torch.randint(m, (b + 1,))
    target[0] = -100
    return randn(b + 1, m), target, None, pick(0, 2), -100, pick(0, 1) * 0.1


def _convolution(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    groups = pick(1, 5)
    i = pick(1, 3)  # 1 makes it depthwise
    bias = randn(groups * n) if pick(0, 1) else None
    if pick(0, 1):
        x, w = randn(b, groups * i, 6), randn(groups * i, n, 3)
        return x, w, bias, (2,), (1,), (1,), True, (1,), groups
    x, w = randn(b, groups * i, 6), randn(groups * n, i, 3)
    return x, w, bias, (1,), (1,), (1,), False, (0,), groups


def _group_norm(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    groups, affine = pick(1, 6), bool(pick(0, 1))
    channels = groups * pick(2, 3)
    scale = (randn(channels), randn(channels)) if affine else (None, None)
    return randn(b, channels, n), groups, *scale, 1e-5


def _complex(*shape: int) -> Tensor:
    return torch.complex(randn(*shape), randn(*shape))


def _places(b: int, m: int, n: int) -> Tensor:
    """Indices [b, 2, n] into a dim of m, no place twice."""
    return torch.rand(b, m, n).argsort(1)[:, :2]


def _regular(b: int, m: int) -> Tensor:
    """Matrices [b, m, m], symmetric and far from singular, their eigenvalues apart."""
    x = torch.diag_embed(torch.arange(1.0, m + 1).double() * 5).expand(b, m, m)
    noise = randn(b, m, m) / 4
    return x + noise + noise.mT


def _index_put(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    values = randn(3, n) if pick(0, 1) else randn(b, 1, n)
    return randn(b, m, n), (None, torch.randperm(max(m, 3))[:3] % m), values, True


def _reshape(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    x = randn(b, m, n, i)
    shapes = [(b * m, n * i), (b, m * n, i), (b * m * n * i,), (b, m * n * i), (b, n, m, i)]
    return x, shapes[pick(0, len(shapes) - 1)]


def _pool(kernel: int) -> Callable[[list[int]], Call]:
    return lambda sizes: ((kernel,) * len(sizes), (1,) * len(sizes), (1,) * len(sizes))


def _pads(sizes: list[int]) -> Call:
    return ((1, 2) * len(sizes),)


def _larger(sizes: list[int]) -> Call:
    return (tuple(2 * s + 1 for s in sizes),)


def _aligned(sizes: list[int]) -> Call:
    return *_larger(sizes), False


def _halves(sizes: list[int]) -> Call:
    return (tuple(s // 2 for s in sizes),)


# Ops of [b, m, *space]: the number of dims of space, and what comes behind the tensor.
SPATIAL: dict[str, tuple[int, Callable[[list[int]], Call]]] = {
    **{f"aten.reflection_pad{k}d.default": (k, _pads) for k in (1, 2, 3)},
    **{f"aten.replication_pad{k}d.default": (k, _pads) for k in (1, 2, 3)},
    **{f"aten.upsample_nearest{k}d.default": (k, _larger) for k in (1, 2, 3)},
    **{f"aten._upsample_nearest_exact{k}d.default": (k, _larger) for k in (1, 2, 3)},
    "aten.upsample_linear1d.default": (1, _aligned),
    "aten.upsample_bilinear2d.default": (2, _aligned),
    "aten.upsample_bicubic2d.default": (2, _aligned),
    "aten._upsample_bicubic2d_aa.default": (2, _aligned),
    "aten._upsample_bilinear2d_aa.default": (2, _aligned),
    "aten.upsample_trilinear3d.default": (3, _aligned),
    **{f"aten.avg_pool{k}d.default": (k, _pool(2)) for k in (2, 3)},
    **{f"aten.max_pool{k}d_with_indices.default": (k, _pool(3)) for k in (2, 3)},
    **{f"aten._adaptive_avg_pool{k}d.default": (k, _halves) for k in (2, 3)},
    **{f"aten.adaptive_max_pool{k}d.default": (k, _halves) for k in (2, 3)},
}


CALLS: dict[str, Callable[[Pick, int, int, int, int], Call]] = {
    "merakc.scaled_linear.default": lambda pick, b, m, n, i: (randn(b, m, i), randn(n, i)),
    "aten.linear.default": lambda pick, b, m, n, i: (
        randn(b, m, i), randn(n, i), randn(n) if pick(0, 1) else None),
    "aten.addmm.default": lambda pick, b, m, n, i: (
        randn(n) if pick(0, 1) else randn(1, n), randn(m, i), randn(i, n)),
    "aten.mm.default": lambda pick, b, m, n, i: (randn(m, i), randn(i, n)),
    "merakc.grouped_mm.default": lambda pick, b, m, n, i: (
        randn(m + n, i), randn(2, i, b), torch.tensor([pick(0, m), pick(m, m + n)])),
    "composite.gathered": lambda pick, b, m, n, i: (randn(b, m, n), pick(0, 2)),
    "aten.bmm.default": lambda pick, b, m, n, i: (randn(b, m, i), randn(b, i, n)),
    "aten.baddbmm.default": lambda pick, b, m, n, i: (
        randn(b, m, n), randn(b, m, i), randn(b, i, n)),
    "aten.matmul.default": lambda pick, b, m, n, i: (
        randn(*((b, 1, m), (m,), ())[pick(0, 2)], i),
        randn(*((3, i, n), (b, 3, i, n), (i,))[pick(0, 2)])),
    "merakc.attention.default": _attention,
    "aten.convolution.default": _convolution,
    "aten.embedding.default": _embedding,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.layer_norm.default": lambda pick, b, m, n, i: (
        randn(b, m, n), (n,), randn(n), randn(n) if pick(0, 1) else None),
    "aten.rms_norm.default": lambda pick, b, m, n, i: (randn(b, m, n), (n,), randn(n), 1e-5),
    "aten.batch_norm.default": lambda pick, b, m, n, i: (
        randn(b, m, n), randn(m), randn(m), None, None, True, 0.1, 1e-5, False),
    "aten.reshape.default": _reshape,
    "aten.expand.default": lambda pick, b, m, n, i: (randn(m, 1, n), (b, m, i, n)),
    "aten.t.default": lambda pick, b, m, n, i: (randn(m, n),),
    "aten.squeeze.dim": lambda pick, b, m, n, i: (randn(b, 1, m), pick(0, 1)),
    "aten.squeeze.dims": lambda pick, b, m, n, i: (randn(b, 1, m, 1), (1, -1)),
    "aten.squeeze.default": lambda pick, b, m, n, i: (randn(b, 1, m),),
    "aten.split.Tensor": lambda pick, b, m, n, i: (randn(b, i * m), m, 1),
    "aten.split_with_sizes.default": lambda pick, b, m, n, i: (
        randn(b, m + n, i), (m, n), 1),
    "aten.cat.default": lambda pick, b, m, n, i: ((randn(b, m, i), randn(b, n, i)), 1),
    "aten.stack.default": lambda pick, b, m, n, i: ((randn(m, n), randn(m, n)), pick(0, 2)),
    "aten.slice_scatter.default": lambda pick, b, m, n, i: (
        randn(b, m, n), randn(b, m - 1, n), 1, 1, m),
    "aten.index.Tensor": lambda pick, b, m, n, i: (
        (randn(m, n, i), (torch.randint(m, (b, 2)),)),
        (randn(m, n, i), (torch.randint(m, (b,)), None, torch.randint(i, (b,)))))[pick(0, 1)],
    "aten.arange.default": lambda pick, b, m, n, i: (m,),
    "aten.arange.start": lambda pick, b, m, n, i: (2, 2 + m),
    "aten.arange.start_step": lambda pick, b, m, n, i: (0, 2 * m, 2),
    "aten.full.default": lambda pick, b, m, n, i: ((m, n), 1.5),
    "aten.zeros.default": lambda pick, b, m, n, i: ((m, n),),
    "aten.ones.default": lambda pick, b, m, n, i: ((m, n),),
    "aten.scalar_tensor.default": lambda pick, b, m, n, i: (1.5,),
    "aten.to.dtype_layout": lambda pick, b, m, n, i: (randn(m, n),),
    "aten.to.device": lambda pick, b, m, n, i: (randn(m, n), torch.device("cpu"), torch.float64),
    "aten.to.other": lambda pick, b, m, n, i: (randn(m, n), randn(1)),
    "aten.fill.Tensor": lambda pick, b, m, n, i: (randn(m, n), randn(1).reshape(())),
    "aten.empty_like.default": lambda pick, b, m, n, i: (randn(m, n),),
    "aten.masked_fill.Scalar": lambda pick, b, m, n, i: (
        randn(b, m, n), torch.rand(m, n) > 0.5, 0.5),
    "aten.masked_fill.Tensor": lambda pick, b, m, n, i: (
        randn(b, m, n), torch.rand(b, 1, n) > 0.5, randn(1).reshape(())),
    "merakc.overwritten.default": lambda pick, b, m, n, i: (randn(b, m, n), randn(b, m, n)),
    "merakc.reached.default": lambda pick, b, m, n, i: (
        torch.randint(4, (b, m)), opaque.enter(NOTED)),
    "merakc.dropout.default": lambda pick, b, m, n, i: (
        randn(b, m, n), *KEYS, 0.5, 1, 1, (b, m, n), (0, 0, 0), (b, m, n)),
    "merakc.uniform.default": lambda pick, b, m, n, i: (
        *KEYS, 1, 1, (b, m, n), (0, 0, 0), (b, m, n), (b, m, n), torch.float64),
    "merakc.normal.default": lambda pick, b, m, n, i: (
        *KEYS, 1, 0, (1, m * n), (0, 0), (1, m * n), (m, n), torch.float64),
    "aten.mv.default": lambda pick, b, m, n, i: (randn(m, i), randn(i)),
    "aten.dot.default": lambda pick, b, m, n, i: (randn(i), randn(i)),
    "aten.vdot.default": lambda pick, b, m, n, i: (randn(i), randn(i)),
    "aten.addbmm.default": lambda pick, b, m, n, i: (randn(m, n), randn(b, m, i), randn(b, i, n)),
    "aten.addmv.default": lambda pick, b, m, n, i: (
        randn(m), randn(m, i), randn(i), {"alpha": 2, "beta": 3}),
    "aten.addr.default": lambda pick, b, m, n, i: (randn(m, n), randn(m), randn(n)),
    "aten._cdist_forward.default": lambda pick, b, m, n, i: (
        randn(b, m, i), randn(b, n, i), 2.0, None),
    **dict.fromkeys(
        ("aten.mse_loss.default", "aten.huber_loss.default", "aten.smooth_l1_loss.default"),
        lambda pick, b, m, n, i: (randn(b, m, n), randn(b, m, n), pick(0, 2)),
    ),
    "aten.soft_margin_loss.default": lambda pick, b, m, n, i: (
        randn(b, m), randn(b, m).sign(), pick(0, 2)),
    "aten.binary_cross_entropy.default": lambda pick, b, m, n, i: (
        torch.rand(b, m).double(), torch.rand(b, m).double(), randn(m) if pick(0, 1) else None,
        pick(0, 2)),
    "aten.binary_cross_entropy_with_logits.default": lambda pick, b, m, n, i: (
        randn(b, m), torch.rand(b, m).double(), randn(m) if pick(0, 1) else None,
        torch.rand(m).double() if pick(0, 1) else None, pick(0, 2)),
    "aten.native_layer_norm.default": lambda pick, b, m, n, i: (
        randn(b, m, n), (n,), randn(n), randn(n) if pick(0, 1) else None, 1e-5),
    "aten.group_norm.default": _group_norm,
    "aten._weight_norm_interface.default": lambda pick, b, m, n, i: (
        randn(m, n), *((randn(m, 1), 0) if pick(0, 1) else (randn(1, n), 1))),
    "aten.linalg_cross.default": lambda pick, b, m, n, i: (
        randn(b, 3, n), randn(b, 3, n), {"dim": 1}),
    "aten.gather.default": lambda pick, b, m, n, i: (
        randn(b, m, n), 1, torch.randint(m, (b, i, n - pick(0, 1)))),
    "aten.scatter.src": lambda pick, b, m, n, i: (
        randn(b, m, n), 1, _places(b, m, n), randn(b, 2, n)),
    "aten.scatter.value": lambda pick, b, m, n, i: (randn(b, m, n), 1, _places(b, m, n), 0.5),
    "aten.scatter.reduce": lambda pick, b, m, n, i: (
        randn(b, m, n), 1, _places(b, m, n), randn(b, 2, n), {"reduce": "add"}),
    "aten.scatter.value_reduce": lambda pick, b, m, n, i: (
        randn(b, m, n), 1, _places(b, m, n), 0.5, {"reduce": "add"}),
    "aten.scatter_add.default": lambda pick, b, m, n, i: (
        randn(b, m, n), 1, torch.randint(m, (b, i, n)), randn(b, i, n)),
    "aten.scatter_reduce.two": lambda pick, b, m, n, i: (
        randn(b, m, n), 1, torch.randint(m, (b, i, n)), randn(b, i, n), "amax"),
    "aten.index_add.default": lambda pick, b, m, n, i: (
        randn(b, m, n), 1, torch.randint(m, (i,)), randn(b, i, n)),
    "aten.index_copy.default": lambda pick, b, m, n, i: (
        randn(b, m, n), 1, torch.randperm(m)[:2], randn(b, 2, n)),
    "aten.index_reduce.default": lambda pick, b, m, n, i: (
        randn(b, m, n), 1, torch.randint(m, (i,)), randn(b, i, n), "mean"),
    "aten.index_fill.int_Scalar": lambda pick, b, m, n, i: (
        randn(b, m, n), 1, torch.randint(m, (2,)), 0.5),
    "aten.index_fill.int_Tensor": lambda pick, b, m, n, i: (
        randn(b, m, n), 1, torch.randint(m, (2,)), randn(1).reshape(())),
    "aten._fft_c2c.default": lambda pick, b, m, n, i: (
        _complex(b, m, n), (pick(0, 2),), 0, True),
    "aten._fft_c2r.default": lambda pick, b, m, n, i: (
        _complex(b, m, n), (1,), 0, 2 * m - 1),
    "aten.linalg_inv_ex.default": lambda pick, b, m, n, i: (_regular(b, m),),
    "aten.linalg_cholesky_ex.default": lambda pick, b, m, n, i: (_regular(b, m),),
    "aten.linalg_qr.default": lambda pick, b, m, n, i: (_regular(b, m),),
    "aten.linalg_matrix_exp.default": lambda pick, b, m, n, i: (randn(b, 3, 3),),
    "aten._linalg_det.default": lambda pick, b, m, n, i: (_regular(b, m),),
    "aten._linalg_slogdet.default": lambda pick, b, m, n, i: (_regular(b, m),),
    "aten._linalg_eigh.default": lambda pick, b, m, n, i: (_regular(b, m),),
    "aten._linalg_svd.default": lambda pick, b, m, n, i: (_regular(b, m),),
    "aten.linalg_solve_triangular.default": lambda pick, b, m, n, i: (
        _regular(b, m).tril(), randn(b, m, n), {"upper": False}),
    "aten.im2col.default": lambda pick, b, m, n, i: (
        randn(b, m, 5, 4), (2, 3), (1, 1), (1, 1), (1, 1)),
    "aten.col2im.default": lambda pick, b, m, n, i: (
        randn(b, m * 6, 8), (5, 4), (2, 3), (1, 1), (0, 0), (1, 1)),
    "aten.pixel_shuffle.default": lambda pick, b, m, n, i: (randn(b, 4 * m, 2, 3), 2),
    "aten.pixel_unshuffle.default": lambda pick, b, m, n, i: (randn(b, m, 4, 6), 2),
    "aten.channel_shuffle.default": lambda pick, b, m, n, i: (randn(b, m * n, 2, 3), m),
    "aten.searchsorted.Tensor": lambda pick, b, m, n, i: (
        randn(b, m).sort()[0] if pick(0, 1) else randn(m).sort()[0], randn(b, n)),
    "aten.grid_sampler_2d.default": lambda pick, b, m, n, i: (
        randn(b, m, 4, 5), 2 * torch.rand(b, n, i, 2).double() - 1, 0, 0, False),
    "aten.grid_sampler_3d.default": lambda pick, b, m, n, i: (
        randn(b, m, 3, 4, 5), 2 * torch.rand(b, n, i, 2, 3).double() - 1, 0, 0, False),
    "aten.max_unpool2d.default": lambda pick, b, m, n, i: (
        *F.max_pool2d(randn(b, m, 4, 6), 2, return_indices=True), (4, 6)),
    "aten.max_unpool3d.default": lambda pick, b, m, n, i: (
        *F.max_pool3d(randn(b, m, 4, 6, 4), 2, return_indices=True), (4, 6, 4), (2, 2, 2),
        (0, 0, 0)),
    "aten.dist.default": lambda pick, b, m, n, i: (randn(m, n), randn(m, n)),
    "aten.view_as_real.default": lambda pick, b, m, n, i: (_complex(b, m, n),),
    "aten._conj.default": lambda pick, b, m, n, i: (_complex(b, m, n),),
    "aten.view_as_complex.default": lambda pick, b, m, n, i: (randn(b, m, 2),),
    "aten.select_scatter.default": lambda pick, b, m, n, i: (
        randn(b, m, n), randn(b, n), 1, pick(0, 1)),
    "aten.unsafe_split.Tensor": lambda pick, b, m, n, i: (randn(b, i * m), m, 1),
    "aten.unsafe_split_with_sizes.default": lambda pick, b, m, n, i: (
        randn(b, m + n, i), (m, n), 1),
    "aten.glu.default": lambda pick, b, m, n, i: (randn(b, 2 * m, 2), pick(1, 2)),
    "aten.index_select.default": lambda pick, b, m, n, i: (
        randn(b, m, n), pick(0, 1), torch.randint(2, (i,))),
    "aten._unsafe_index.Tensor": lambda pick, b, m, n, i: (
        randn(b, m, n, i), (None, None, torch.randint(n, (4, 1)), torch.randint(i, (3,)))),
    "aten.index_put.default": lambda pick, b, m, n, i: _index_put(pick, b, m, n, i),
    "aten._unsafe_index_put.default": lambda pick, b, m, n, i: _index_put(pick, b, m, n, i),
    "aten.linspace.default": lambda pick, b, m, n, i: (0.0, 1.0, m),
    "aten.logspace.default": lambda pick, b, m, n, i: (0.0, 1.0, m),
    "aten.eye.default": lambda pick, b, m, n, i: (m,),
    "aten.eye.m": lambda pick, b, m, n, i: (m, n),
    "aten.empty.memory_format": lambda pick, b, m, n, i: ((m, n),),
    "aten.empty_strided.default": lambda pick, b, m, n, i: ((m, n), (n, 1)),
    "aten.tril_indices.default": lambda pick, b, m, n, i: (m, n),
    "aten.triu_indices.default": lambda pick, b, m, n, i: (m, n),
    "aten.hann_window.default": lambda pick, b, m, n, i: (m,),
    "aten.hamming_window.default": lambda pick, b, m, n, i: (m,),
    "aten.copy.default": lambda pick, b, m, n, i: (randn(b, m, n), randn(n)),
    "aten.complex.default": lambda pick, b, m, n, i: (randn(b, m, n), randn(m, n)),
    "aten.polar.default": lambda pick, b, m, n, i: (torch.rand(m, n).double(), randn(m, n)),
    "aten._prelu_kernel.default": lambda pick, b, m, n, i: (randn(b, m, n), randn(1, m, 1)),
    "aten.rsub.Tensor": lambda pick, b, m, n, i: (randn(b, m, n), randn(m, 1)),
    "aten.floor_divide.default": lambda pick, b, m, n, i: (randn(b, m), randn(m)),
    # elementwise, without a row
    "aten.mul.Tensor": lambda pick, b, m, n, i: (randn(b, 1, n), randn(m, 1)),
    "aten.where.self": lambda pick, b, m, n, i: (
        torch.rand(m, n) > 0.5, randn(b, m, n), randn(1, n)),
}  # fmt: skip
OPS = sorted({*CALLS, *OF_ONE, *SPATIAL})
# The tensors of a call that have no gradient in torch, by their place among the tensors.
EVERY = range(9)
WITHOUT_GRADIENT = {
    "aten.binary_cross_entropy.default": range(2, 3),
    "aten.binary_cross_entropy_with_logits.default": range(2, 4),
    "aten.bucketize.Tensor": EVERY,
    "aten.copy.default": EVERY,
    "aten.floor_divide.default": EVERY,
    "aten.floor_divide.Scalar": EVERY,
    "aten.scatter.reduce": EVERY,
    "aten.searchsorted.Tensor": EVERY,
    "aten.scatter.value_reduce": EVERY,
    "aten.soft_margin_loss.default": range(1, 2),
}

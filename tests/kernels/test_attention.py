"""`merakc::attention` against torch's own attention: values, gradients, layouts, tracing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from merakc.kernels import attention as kernel
from merakc.kernels import attention_formulas as formulas
from merakc.kernels.attention import attention

B, H, S, T, D = 2, 4, 5, 7, 8
MASK_SHAPES = [(S, T), (1, T), (B, H, S, T), (B, 1, S, T), (B, 1, 1, T), (1, H, S, 1)]
MASK_SHAPES_3D = [(H, S, T), (1, S, T), (1, 1, T)]


def _heads(
    heads: int, length: int, dim: int, dtype: torch.dtype = torch.float64, layout: str = "bshd"
) -> Tensor:
    if layout == "bshd":
        return torch.randn(B, length, heads, dim, dtype=dtype).transpose(1, 2)
    if layout == "bhsd":
        return torch.randn(B, heads, length, dim, dtype=dtype)
    assert layout == "columns"
    return torch.randn(B, heads, dim, length, dtype=dtype).transpose(2, 3)


def _inputs(key_heads: int = H, value_dim: int = D, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = _heads(H, S, D, **kwargs)
    k = _heads(key_heads, T, D, **kwargs)
    v = _heads(key_heads, T, value_dim, **kwargs)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _mask(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    if kind == "float":
        return torch.randn(shape, dtype=dtype)
    return torch.rand(shape) > 0.3


def _with_grads(
    function: Callable[..., Tensor], qkv: tuple[Tensor, ...], *args: Any, **kwargs: Any
) -> list[Tensor]:
    out = function(*qkv, *args, **kwargs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, qkv, grad.to(out.dtype))]


def _largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    differences = [(x - y).abs().max().item() for x, y in zip(ours, theirs, strict=True)]
    assert not any(map(math.isnan, differences)), differences
    return max(differences)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bit_equal_to_torch(dtype: torch.dtype, causal: bool, layout: str) -> None:
    qkv = _inputs(dtype=dtype, layout=layout)
    ours = _with_grads(attention, qkv, causal=causal, scale=0.3)
    theirs = _with_grads(F.scaled_dot_product_attention, qkv, is_causal=causal, scale=0.3)
    assert _largest_difference(ours, theirs) == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_bit_equal_to_torch_with_mask(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    qkv = _inputs(dtype=dtype)
    mask = _mask(kind, shape, dtype)
    theirs = _with_grads(F.scaled_dot_product_attention, qkv, mask)
    assert _largest_difference(_with_grads(attention, qkv, mask), theirs) == 0.0
    expanded = mask.expand(B, H, S, T)
    assert _largest_difference(_with_grads(attention, qkv, expanded), theirs) == 0.0


@pytest.mark.parametrize("shape", MASK_SHAPES_3D)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_of_three_dims(kind: str, shape: tuple[int, ...]) -> None:
    qkv = _inputs()
    mask = _mask(kind, shape)
    theirs = _with_grads(F.scaled_dot_product_attention, qkv, mask)  # torch has no kernel for it
    assert _largest_difference(_with_grads(attention, qkv, mask), theirs) < 1e-12


@pytest.mark.parametrize("mask_shape", [None, (B, 1, S, T)])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_heads(key_heads: int, mask_shape: tuple[int, ...] | None) -> None:
    qkv = _inputs(key_heads)
    mask = None if mask_shape is None else _mask("bool", mask_shape)

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        times = H // key_heads
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        return F.scaled_dot_product_attention(q, k, v, mask)

    ours = _with_grads(attention, qkv, mask)
    theirs = _with_grads(F.scaled_dot_product_attention, qkv, mask, enable_gqa=True)
    assert _largest_difference(ours, theirs) < 1e-12
    assert _largest_difference(ours, _with_grads(repeated, qkv)) < 1e-12


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_causal_combines_with_mask(kind: str) -> None:
    qkv = _inputs()
    mask = _mask(kind, (B, 1, S, T))
    past = torch.ones(S, T, dtype=torch.bool).tril()
    both = mask & past if kind == "bool" else mask.masked_fill(~past, -torch.inf)
    theirs = _with_grads(F.scaled_dot_product_attention, qkv, both)
    assert _largest_difference(_with_grads(attention, qkv, mask, causal=True), theirs) < 1e-12


@pytest.mark.parametrize("value_dim", [D, D - 2])  # flash, reference
def test_query_that_sees_no_key_yields_zeros(value_dim: int) -> None:
    qkv = _inputs(value_dim=value_dim)
    mask = torch.ones(S, T, dtype=torch.bool)
    mask[2] = False
    ours = _with_grads(attention, qkv, mask)
    assert ours[0][:, :, 2].abs().max() == 0.0
    with sdpa_kernel(SDPBackend.MATH):
        theirs = _with_grads(F.scaled_dot_product_attention, qkv, mask)
    assert _largest_difference(ours, theirs) < 1e-12


def test_expanded_mask_is_not_spelled_out() -> None:
    mask = _mask("bool", (B, 1, 1, T)).expand(B, H, S, T)
    bias, _ = formulas.bias_of(mask, False, S, T, torch.float64)
    assert bias is not None
    assert bias.shape == (B, 1, 1, T)


def test_only_the_output_is_differentiable() -> None:
    out, logsumexp = torch.ops.merakc.attention(*_inputs(), None, False, 0.3)
    assert out.requires_grad
    assert not logsumexp.requires_grad


def test_last_dim_of_any_stride() -> None:
    qkv = _inputs(layout="columns")
    dense = tuple(x.detach().contiguous().requires_grad_() for x in qkv)
    ours = _with_grads(attention, qkv)
    assert _largest_difference(ours, _with_grads(F.scaled_dot_product_attention, dense)) == 0.0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [H, 2])
@pytest.mark.parametrize("kind", ["bool", "float", None])
def test_reference_agrees_with_flash(kind: str | None, key_heads: int, causal: bool) -> None:
    q, k, v = (x.detach() for x in _inputs(key_heads))
    mask = None if kind is None else _mask(kind, (H, S, T))
    scale = 0.3
    out, logsumexp = torch.ops.merakc.attention(q, k, v, mask, causal, scale)
    grad = torch.randn_like(out)
    grads = torch.ops.merakc.attention_backward(grad, q, k, v, out, logsumexp, mask, causal, scale)
    reference = formulas.reference(q, k, v, mask, causal, scale)
    assert _largest_difference(list(reference), [out, logsumexp]) < 1e-12
    reference_grads = formulas.reference_backward(grad, q, k, v, *reference, mask, causal, scale)
    assert _largest_difference(list(reference_grads), list(grads)) < 1e-12
    _assert_same_strides([*reference, *reference_grads], [out, logsumexp, *grads])


def test_reference_of_other_value_dims_equals_torch() -> None:
    qkv = _inputs(2, value_dim=6)
    ours = _with_grads(attention, qkv, causal=True)
    theirs = _with_grads(F.scaled_dot_product_attention, qkv, is_causal=True, enable_gqa=True)
    assert _largest_difference(ours, theirs) < 1e-12


def test_reference_of_half_precision_sums_in_float32() -> None:
    qkv = _inputs(value_dim=6, dtype=torch.bfloat16)
    ours = _with_grads(attention, qkv)
    exact = tuple(x.detach().double().requires_grad_() for x in qkv)
    theirs = _with_grads(F.scaled_dot_product_attention, exact)
    assert all(x.dtype == torch.bfloat16 for x in ours)
    for x, y in zip(ours, theirs, strict=True):  # bfloat16 keeps 8 bits
        torch.testing.assert_close(x.double(), y, rtol=2**-6, atol=2**-6)


def test_no_keys_and_no_queries() -> None:
    q, k, v = (x.detach() for x in _inputs())
    assert attention(q, k[:, :, :0], v[:, :, :0]).abs().max() == 0.0
    assert attention(q[:, :, :0], k, v).shape == (B, H, 0, D)


def _assert_same_strides(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert [x.stride() for x in ours] == [x.stride() for x in theirs]
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]


@pytest.mark.parametrize("sizes", [(2, 4, 5, 7), (1, 4, 1, 7), (2, 2, 1, 1), (1, 2, 3, 3)])
@pytest.mark.parametrize("value_dim", [D, D - 2])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "columns"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fake_strides_are_the_real_ones(
    sizes: tuple[int, int, int, int], value_dim: int, layout: str, dtype: torch.dtype
) -> None:
    b, h, s, t = sizes
    q, k, v = (
        _heads(heads, length, dim, dtype, layout)[:b]
        for heads, length, dim in ((h, s, D), (2, t, D), (2, t, value_dim))
    )
    args = (None, True, 0.3)
    real = list(torch.ops.merakc.attention(q, k, v, *args))
    grad = torch.randn((b, h, s, value_dim), dtype=dtype)
    real_grads = list(torch.ops.merakc.attention_backward(grad, q, k, v, *real, *args))
    _assert_same_strides(list(kernel.fake(q, k, v, *args)), real)
    _assert_same_strides(list(kernel.fake_backward(grad, q, k, v)), real_grads)
    assert real[0].transpose(1, 2).is_contiguous()


def test_trace_of_forward_and_backward_runs() -> None:
    """Two opaque nodes; the views around them, chosen from fake strides, hold for real ones."""

    def loss_grads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        merged = attention(q, k, v, causal=True).transpose(1, 2).reshape(B, S, H * D)
        loss = merged.square().sum()
        return loss, *torch.autograd.grad(loss, (q, k, v))

    qkv = _inputs(2)
    graph = make_fx(loss_grads, tracing_mode="fake")(*qkv)
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count("merakc.attention.default") == 1
    assert targets.count("merakc.attention_backward.default") == 1
    assert not any("scaled_dot_product" in t or "clone" in t or "softmax" in t for t in targets)
    traced = graph(*(x.detach() for x in qkv))
    assert _largest_difference(list(traced), list(loss_grads(*qkv))) == 0.0


@pytest.mark.parametrize("value_dim", [D, D - 2])
def test_opcheck(value_dim: int) -> None:
    qkv = _inputs(2, value_dim)
    for mask in (None, _mask("bool", (S, T))):
        torch.library.opcheck(torch.ops.merakc.attention.default, (*qkv, mask, True, 0.3))


@pytest.mark.parametrize("value_dim", [3, 2])
def test_gradcheck(value_dim: int) -> None:
    q, k, v = (x[:, :, :3, :3].detach().requires_grad_() for x in _inputs(2))
    v = v[..., :value_dim].detach().requires_grad_()
    mask = _mask("float", (3, 3))
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, mask), (q, k, v))


def test_wrong_shapes_are_refused() -> None:
    q, k, v = _inputs()
    for bad_k, bad_v in ((k[:, :3], v[:, :3]), (k, v[:, :, :3]), (k.float(), v)):
        with pytest.raises(AssertionError):
            attention(q, bad_k, bad_v)
    with pytest.raises(AssertionError, match="does not broadcast"):
        attention(q, k, v, torch.zeros(S, T - 1))

"""Calls that the recorder writes in another form, so that a graph does not depend on the device.

Attention and dropout become ops of our own; BatchNorm's hidden write to its statistics becomes
explicit arithmetic. Each function here runs under the recorder: the torch calls it makes are
recorded in place of the original one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from merakc.frontend.calls.forms import op_name

# Composite ops kept whole: the sharding rules and the cost model know them. Any other composite
# op is recorded as the ops that it is made of.
KEPT = frozenset(
    {
        "aten.linear.default",
        "aten.matmul.default",
        "aten.scaled_dot_product_attention.default",
        "aten.layer_norm.default",
        "aten.rms_norm.default",
        "aten.group_norm.default",
        "aten.cross_entropy_loss.default",
        "aten.dropout.default",
        "aten.dropout_.default",
        "aten.batch_norm.default",
        "aten.reshape.default",
        "aten.contiguous.default",
        "aten.softmax.int",
        "aten.log_softmax.int",
        "aten.to.dtype",
        "aten.to.dtype_layout",
        "aten.to.device",
        "aten.to.other",
    }
)

MASKS = (torch.bool, torch.uint8)
PLACES = ("device", "layout", "pin_memory")
GROUPED = "merakc.grouped_mm.default"  # rows in groups, times a matrix each
# A view of a whole tensor may need a copy of a shard: `reshape` decides that where it runs.
RENAMED = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
    # What transformers calls in place of torch's where it is compiled, which it believes it is.
    "transformers.grouped_mm_fallback.default": GROUPED,
}


def recorded_name(func: Any, args: Sequence[Any]) -> str:
    """The name under which a call is recorded."""
    name = op_name(func)
    if name == "aten._grouped_mm.default" and [a.dim() for a in args[:2]] == [2, 3]:
        return GROUPED if len(args) == 3 else name
    return RENAMED.get(name, name)


@cache
def decomposes(func: Any) -> bool:
    """Whether an op is recorded as the ops that it is made of."""
    return str(func) not in KEPT and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


def refused(op: str, args: Sequence[Any]) -> tuple[str, str] | None:
    """What is wrong with a call, and the remedy, where its graph would not be what eager does."""
    if op == "aten.embedding.default" and len(args) > 4 and args[4]:
        return "an embedding with sparse gradients", "make it with sparse=False"
    if op == "aten.is_set_to.default":
        return "whether two tensors have one memory is asked", "tell tensors apart by `is`"
    return None


def attention(
    emit_attention: Callable[..., torch.Tensor],
    mask_requires_grad: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention`: our own op, or plain ops where that cannot be.

    Our op takes query `[b, h, s, d]`, key and value `[b, kv, t, d]`, a mask without a gradient,
    and no dropout. Otherwise (T5's learned bias, dropout on the weights, other ranks) the
    definition in torch's documentation is recorded op by op.
    """
    scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    plain = query.dim() == key.dim() == value.dim() == 4 and not mask_requires_grad
    if plain and dropout_p == 0.0:
        return emit_attention(query, key, value, attn_mask, is_causal, scale)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(ones.tril().logical_not(), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    softmax = (
        torch.softmax if attn_mask is None else torch._safe_softmax
    )  # of rows that see nothing
    weights = softmax(scores, -1)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)


def batch_norm(
    normalise: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """`F.batch_norm` with the update of the running statistics written out.

    `x` is `[n, c, *]`. torch's op writes `running_mean` and `running_var` without saying so in
    its schema; here the update is recorded as `lerp`s, with the unbiased variance as in
    `torch.nn.BatchNorm2d`.
    """
    if not training or running_mean is None or running_var is None:
        return normalise(
            x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
        )
    with torch.no_grad():
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x.to(torch.promote_types(x.dtype, running_var.dtype))  # statistics may not fit x's
        variance, mean = torch.var_mean(wide, dims, unbiased=True)
        running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
        running_var.copy_(running_var * (1 - momentum) + variance * momentum)
    return normalise(x, weight, bias, None, None, True, momentum, eps, cudnn_enabled)


def filled(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The mask and the values of `x[..., mask] = values`, as `torch.where` takes them beside x.

    None where the places that are written do not all get the same.
    """
    given = [(k, i) for k, i in enumerate(indices) if i is not None]
    if len(given) != 1 or given[0][1].dtype not in MASKS:
        return None
    dim, mask = given[0]
    behind = x.dim() - dim - mask.dim()
    shape = (1,) * (dim + 1 + behind - values.dim()) + tuple(values.shape)
    if len(shape) != dim + 1 + behind or type(shape[dim]) is not int or shape[dim] != 1:
        return None
    values = values.reshape(*shape[:dim], *(1,) * mask.dim(), *shape[dim + 1 :])
    return mask.bool().reshape(*(1,) * dim, *mask.shape, *(1,) * behind), values


def with_dtype(func: Any, kwargs: dict[str, Any], out: Any) -> dict[str, Any]:
    """The arguments of a call with the dtype of what it makes, if that is not said and could be."""
    if kwargs.get("dtype") is not None or not isinstance(out, torch.Tensor):
        return kwargs
    named = any(a.name == "dtype" and a.kwarg_only for a in func._schema.arguments)
    return {**kwargs, "dtype": out.dtype} if named else kwargs


def device_free(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A call without device, layout and pinning: the runtime chooses those."""
    kwargs = without_places(kwargs)
    if name == "aten.to.device":  # the one that takes it by its place
        name, args = "aten.to.dtype", (args[0], *args[2:])
    return name, args, kwargs


def without_places(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that do not say where a result lies."""
    return kwargs and {k: v for k, v in kwargs.items() if k not in PLACES}

"""merakc's own ops on a device, against their plain formulas in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

import merakc.kernels.ops  # noqa: F401 it registers them
from merakc.kernels.attention_formulas import reference, reference_backward
from merakc.kernels.float8.scaled import LEAST_CAPABILITY

ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def attention_cases() -> Iterator[dict[str, Any]]:
    """Shapes, layouts and masks that choose different kernels."""
    shapes = (
        (2, 8, 8, 128, 128, 64, 64), (2, 8, 2, 256, 256, 128, 128), (1, 4, 4, 65, 65, 40, 40),
        (2, 4, 2, 33, 70, 64, 64), (1, 4, 4, 128, 128, 36, 36), (2, 4, 1, 96, 96, 64, 32),
        (1, 2, 2, 1, 50, 128, 128), (1, 4, 4, 100, 100, 256, 256),
    )  # fmt: skip
    for sizes, dtype, mask, causal in product(
        shapes, ALLOWED, (None, "bool", "float", "rows"), (False, True)
    ):
        yield {"sizes": sizes, "dtype": dtype, "mask": mask, "causal": causal}


def attention_errors(
    device: torch.device, sizes: tuple[int, ...], dtype: torch.dtype, mask: str | None, causal: bool
) -> dict[str, float]:
    """Relative errors of the output and of the gradients, in the norm of each."""
    b, h, g, s, t, d, e = sizes
    draws = torch.Generator().manual_seed(0)

    def drawn(heads: int, length: int, dim: int) -> Tensor:
        made = torch.randn((b, length, heads, dim), generator=draws, dtype=torch.float64)
        return made.transpose(1, 2).to(device, dtype)

    q, k, v, grad = drawn(h, s, d), drawn(g, t, d), drawn(g, t, e), drawn(h, s, e)
    seen: Tensor | None = None
    if mask == "bool":
        seen = torch.rand((b, 1, s, t), generator=draws).gt(0.3).to(device)
    elif mask == "float":
        seen = torch.randn((1, h, s, t), generator=draws).to(device, dtype)
    elif mask == "rows":  # padding; the first sample's last query sees nothing
        seen = torch.ones((b, 1, s, t), dtype=torch.bool)
        seen[0, :, :, t // 2 :] = False
        seen[0, :, -1] = False
        seen = seen.to(device)
    scale = d**-0.5
    out, logsumexp = torch.ops.merakc.attention(q, k, v, seen, causal, scale)
    made = q, k, v, out, logsumexp
    grads = torch.ops.merakc.attention_backward(grad, *made, seen, causal, scale)
    wide_q, wide_k, wide_v = (x.double() for x in (q, k, v))
    if seen is not None and seen.is_floating_point():
        seen = seen.double()
    exact = reference(wide_q, wide_k, wide_v, seen, causal, scale)
    exact_grads = reference_backward(
        grad.double(), wide_q, wide_k, wide_v, *exact, mask=seen, causal=causal, scale=scale
    )
    pairs = zip(("out", "dq", "dk", "dv"), (out, *grads), (exact[0], *exact_grads), strict=True)
    least = grad.double().norm() / 100  # of one that is zero in theory
    return {n: float((x.double() - y).norm() / max(y.norm(), least)) for n, x, y in pairs}


def check_attention(device: torch.device) -> list[str]:
    """What is wrong, a line each."""
    wrong = []
    for case in attention_cases():
        text = ", ".join(f"{name}={value}" for name, value in case.items())
        try:
            errors = attention_errors(device, **case)
        except Exception as error:
            wrong.append(f"{text}: {type(error).__name__}: {str(error)[:300]}")
            continue
        if not all(error <= ALLOWED[case["dtype"]] for error in errors.values()):
            wrong.append(f"{text}: " + ", ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    return wrong


def scores_errors(
    device: torch.device, sizes: tuple[int, int, int], dtype: torch.dtype, *, bias: bool
) -> dict[str, float]:
    """The same of a loss in blocks, of n rows of h with c classes."""
    n, h, c = sizes
    draws = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64).to(device, dtype)

    x, w, b = drawn(n, h), drawn(c, h), drawn(c) if bias else None
    labels = torch.randint(0, c, (n,), generator=draws)
    labels[0] = -100
    labels = labels.to(device)
    of_total, of_picked = (drawn(n).float() for _ in range(2))

    def both(*given: Tensor | None) -> list[Tensor]:
        x, w, b, of_total, of_picked = given
        ops = torch.ops.merakc
        made = ops.scores(x, w, b, labels, start=0, vocab=c, ignored=-100, onednn=False)
        grads = ops.scores_backward(
            of_total, of_picked, x, w, b, labels, total=made[0], start=0, onednn=False,
            wanted_w=True, wanted_x=True, wanted_bias=bias,
        )  # fmt: skip
        return [*made, *grads]

    ours = both(x, w, b, of_total, of_picked)
    wide = [None if t is None else t.double() for t in (x, w, b, of_total, of_picked)]
    pairs = zip(("total", "picked", "dw", "dx", "dbias"), ours, both(*wide), strict=True)
    return {n: float((x.double() - y).norm() / (y.norm() + 1e-30)) for n, x, y in pairs}


def check_scores(device: torch.device) -> list[str]:
    """What is wrong, a line each."""
    wrong = []
    shapes = ((5, 8, 300), (64, 32, 9001), (1000, 64, 40000), (17, 64, 200000))
    for sizes, dtype, bias in product(shapes, ALLOWED, (False, True)):
        errors = scores_errors(device, sizes, dtype, bias=bias)
        if not all(error <= ALLOWED[dtype] for error in errors.values()):
            text = ", ".join(f"{n} {e:.1e}" for n, e in errors.items())
            wrong.append(f"sizes={sizes}, dtype={dtype}, bias={bias}: {text}")
    return wrong


def scaled_errors(device: torch.device, sizes: tuple[int, int, int]) -> dict[str, float]:
    """The same of a product of float8 of [m, k] and [n, k]: against that of the same numbers in
    float64 on a CPU.
    """
    m, n, k = sizes
    draws = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=draws).bfloat16() for shape in ((m, k), (n, k), (m, n))]

    def made(*tensors: Tensor) -> list[Tensor]:
        x, w = (t.requires_grad_() for t in tensors[:2])
        out: Tensor = torch.ops.merakc.scaled_linear(x, w)
        return [out.detach(), *torch.autograd.grad(out, [x, w], tensors[2])]

    ours, exact = made(*(t.to(device) for t in given)), made(*(t.double() for t in given))
    pairs = zip(("out", "dx", "dw"), ours, exact, strict=True)
    return {name: float((x.cpu().double() - y).norm() / y.norm()) for name, x, y in pairs}


def check_scaled(device: torch.device) -> list[str]:
    """What is wrong, a line each; nothing where the device has no such products."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return []
    wrong = []
    for sizes in ((64, 64, 64), (1, 48, 32), (100, 24, 40), (2048, 1024, 4096)):
        errors = scaled_errors(device, sizes)
        if not all(error <= ALLOWED[torch.bfloat16] for error in errors.values()):
            wrong.append(f"sizes={sizes}: " + ", ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    return wrong

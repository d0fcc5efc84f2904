"""Products of float8 equal plain PyTorch of the same recipe, and torch's own scaled products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from merakc.errors import ConfigError
from merakc.kernels.float8.scaled import FLOAT8, check_device, scaled_linear

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def steps(x: Tensor) -> Tensor:
    """The least power of two for each row by which it comes to 448 or less."""
    largest = x.abs().amax(-1, keepdim=True).double()
    return torch.where(largest > 0, 2.0 ** torch.ceil(torch.log2(largest / 448)), 1.0)


def rounded(x: Tensor) -> Tensor:
    """The numbers that the float8 ones of each row stand for."""
    step = steps(x)
    return (x.double() / step).to(FLOAT8).double() * step


class Recipe(torch.autograd.Function):
    """What torch's own calls make of the recipe, in float64 within a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (rounded(x) @ rounded(w).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, w) = grads, ctx.saved_tensors
        of_x = (rounded(grad) @ rounded(w.t().contiguous()).t()).to(x.dtype)
        return of_x, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def drawn(*shape: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    """Numbers of many magnitudes, of rows of many."""
    rows = torch.exp(spread * torch.randn(*shape[:-1], 1))
    return (torch.randn(shape) * rows).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_directions_equal_plain_calls(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = drawn(3, 7, 40, dtype=dtype), drawn(24, 40, dtype=dtype)
    tangent = torch.randn(3, 7, 24).to(dtype)
    found, wanted = scaled_linear(x, w), Recipe.apply(x, w)
    pairs = [(found, wanted)]
    of_found = torch.autograd.grad(found, [x, w], tangent)
    pairs += zip(of_found, torch.autograd.grad(wanted, [x, w], tangent), strict=True)
    for own, other in pairs:
        limit = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        assert own.dtype == dtype
        assert (own - other).abs().max() <= limit * other.abs().max()
    assert torch.equal(of_found[1], pairs[2][1])  # the weight's is not rounded


def test_products_equal_torchs_own() -> None:
    torch.manual_seed(0)
    x, w = (drawn(n, 64, dtype=torch.bfloat16).detach() for n in (32, 48))
    of_x, of_w = steps(x).float(), steps(w).float()
    left, right = (x / of_x).to(FLOAT8), (w / of_w).to(FLOAT8)
    wanted = torch._scaled_mm(
        left, right.t(), of_x, of_w.t().contiguous(), out_dtype=torch.bfloat16
    )
    assert torch.equal(scaled_linear(x, w), wanted)


def test_no_row_is_rounded_by_another() -> None:
    torch.manual_seed(0)
    x, w = drawn(9, 32, dtype=torch.float32), drawn(16, 32, dtype=torch.float32)
    whole = scaled_linear(x, w)
    assert torch.equal(scaled_linear(x[2:5], w), whole[2:5])
    assert torch.equal(scaled_linear(x, w[7:]), whole[:, 7:])


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so_in_its_row(bad: float) -> None:
    x, w = torch.ones(4, 32), torch.ones(16, 32)
    x[1, 3] = bad
    found = scaled_linear(x, w)
    assert found[1].isnan().all()
    assert torch.equal(found[0], torch.full((16,), 32.0))


def test_zeros_tiny_rows_and_rows_of_nothing() -> None:
    w = torch.ones(16, 32)
    for x in (torch.zeros(2, 32), torch.full((2, 32), 2.0**-60), torch.full((2, 32), 2.0**100)):
        assert torch.equal(scaled_linear(x, w), x @ w.t())
    assert torch.equal(scaled_linear(torch.ones(2, 0), torch.ones(16, 0)), torch.zeros(2, 16))
    assert scaled_linear(torch.ones(0, 32), w).shape == (0, 16)


@pytest.mark.parametrize(
    ("capability", "dtype", "message"),
    [
        ((8, 0), torch.bfloat16, r"A GPU, of .* 8.0, has no .*, which need 8.9"),
        ((9, 0), torch.float32, r'beside torch.float32 .* precision="fp8-mixed"'),
        ((8, 9), torch.bfloat16, ""),
    ],
)  # fmt: skip
def test_gpus_without_them_are_refused(
    capability: tuple[int, int], dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    check_device(torch.device("cpu"), dtype)
    if not message:
        check_device(torch.device("cuda"), dtype)
        return
    with pytest.raises(ConfigError, match=message):
        check_device(torch.device("cuda"), dtype)

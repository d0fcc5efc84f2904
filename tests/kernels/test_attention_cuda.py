"""What kernels of CUDA are called with, with formulas in their place that ask what they ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from merakc.kernels import attention_cuda as module
from merakc.kernels.attention_cuda import CUDNN, EFFICIENT, FLASH, backward, forward
from merakc.kernels.attention_formulas import reference, reference_backward

SCALE = 0.2
UNREAD = (None, None, 0, 0, None, None, None)


class Kernels:
    """In the place of `torch.ops.aten`: what each kernel wants, and the formulas."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def _out(self, name: str, q: Tensor, k: Tensor, v: Tensor, bias: Any, causal: bool,
             scale: float) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.called.append(name)
        assert bias is None or bias.shape == (*q.shape[:3], k.shape[2])
        assert bias is None or bias.stride(-2) % module.MASK_COLUMNS == 0 or bias.shape[-2] == 1
        return reference(q, k, v, bias, causal, scale)

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float
    ) -> Any:
        assert q.shape[3] % module.HEAD_DIMS == 0
        out, logsumexp = self._out("flash", q, k, v, None, causal, scale)
        return (out, logsumexp.contiguous(), *UNREAD)

    def _scaled_dot_product_flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
        cum_q: None, cum_k: None, most_q: int, most_k: int, dropout: float, causal: bool,
        seed: Tensor, offset: Tensor, *, scale: float,
    ) -> Any:  # fmt: skip
        self.called.append("flash backward")
        assert (most_q, most_k) == (q.shape[2], k.shape[2])
        assert logsumexp.is_contiguous()
        return reference_backward(grad, q, k, v, out, logsumexp, None, causal, scale)

    def _scaled_dot_product_cudnn_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, keeps: bool, dropout: float,
        causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert keeps
        out, logsumexp = self._out("cudnn", q, k, v, bias, causal, scale)
        return (out, logsumexp.contiguous().unsqueeze(-1), *UNREAD)

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
        seed: Tensor, offset: Tensor, bias: Any, cum_q: None, cum_k: None, most_q: int, most_k: int,
        dropout: float, causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        self.called.append("cudnn backward")
        assert logsumexp.shape == (*q.shape[:3], 1)
        return reference_backward(grad, q, k, v, out, logsumexp[..., 0], bias, causal, scale)

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, keeps: bool, dropout: float,
        causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert keeps
        assert q.shape[1] == k.shape[1], "it takes no groups"
        out, logsumexp = self._out("efficient", q, k, v, bias, causal, scale)
        more = -q.shape[2] % 32
        return out, torch.nn.functional.pad(logsumexp, (0, more), value=torch.inf), None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor,
        logsumexp: Tensor, seed: Tensor, offset: Tensor, dropout: float, wanted: list[bool],
        causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        self.called.append("efficient backward")
        assert logsumexp.shape[2] % 32 == 0
        assert logsumexp.is_contiguous()
        assert wanted == [True, True, True, False]
        own = logsumexp[..., : q.shape[2]]
        return (*reference_backward(grad, q, k, v, out, own, bias, causal, scale), None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(module, "ATEN", made)
    return made


@pytest.mark.parametrize(
    ("kernel", "name", "groups", "dim", "masked"),
    [
        (FLASH, "flash", 4, 8, False),
        (FLASH, "flash", 2, 6, False),
        (CUDNN, "cudnn", 2, 8, True),
        (CUDNN, "cudnn", 4, 8, False),
        (EFFICIENT, "efficient", 4, 8, True),
        (EFFICIENT, "efficient", 2, 8, True),
        (0, "", 2, 8, True),
    ],
)
@pytest.mark.parametrize("length", [5, 32])
def test_a_kernel_is_called_as_it_wants(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch,
    kernel: int, name: str, groups: int, dim: int, masked: bool, length: int,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    monkeypatch.setattr(
        module,
        "_choice",
        lambda q, k, *_: 0 if kernel == EFFICIENT and q.shape[1] != k.shape[1] else kernel,
    )
    q, grad = (torch.randn(2, 4, length, dim, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, groups, 7, dim, dtype=torch.float64) for _ in range(2))
    mask = None
    if masked:  # one query sees no key
        mask = torch.rand(2, 1, length, 7) > 0.4
        mask[0, :, -1] = False
    given = (mask, False, SCALE)
    wanted = reference(q, k, v, *given)
    out, logsumexp = forward(q, k, v, *given)
    found = backward(grad, q, k, v, out, logsumexp, *given)
    others = reference_backward(grad, q, k, v, *wanted, *given)
    for one, other in zip((out, *found), (wanted[0], *others), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        assert one.stride() == other.stride()
    assert kernels.called == ([name, f"{name} backward"] if name else [])


def test_no_keys_are_the_formulas() -> None:
    q = torch.randn(1, 2, 3, 8)
    out, _ = forward(q, q[:, :, :0], q[:, :, :0], None, False, SCALE)
    assert out.abs().max() == 0

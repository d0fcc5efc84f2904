"""Products of float32 matrices on a CPU by oneDNN, where it is faster than what torch calls.

torch multiplies them by MKL. Of a core of an AMD EPYC (Zen 5) that reaches 65 to 97 GFLOP/s, about
what AVX2 gives, and oneDNN 123 to 213, with AVX-512. torch brings both along, and its own code
generator calls oneDNN for the linear layers of inference. Nothing but the order of sums differs.
`torch.backends.mkldnn.enabled = False`, torch's switch, turns it off here, too. `merakc::linear`,
`merakc::mm` and `merakc::addmm` are torch's so computed, on a CPU and without gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

# By torch's op the one that oneDNN computes, and the other way.
OPS: Final = {f"aten.{op}.default": f"merakc.{op}.default" for op in ("addmm", "linear", "mm")}
TORCHS: Final = {own: op for op, own in OPS.items()}
# Faster is what takes so many times less of the CPU, for a square of so many rows.
LEAST_GAIN, SIDE, REPEATS = 1.3, 512, 5
# A smaller product takes longer to call by oneDNN, which looks up its kernel each time, than it
# gains: on Zen 5 both take as long at 2 MFLOP.
LEAST_FLOPS: Final = 1 << 23
# Of what is added to a total at once; smaller blocks are slower.
BLOCK_BYTES: Final = 16 << 20

_NAME: Final = "_linear_pointwise"


def is_faster() -> bool:
    """Whether oneDNN is switched on and clearly faster on this machine."""
    there = torch._C._has_mkldnn and torch._C._get_mkldnn_enabled()
    return bool(there and hasattr(torch.ops.mkldnn, _NAME) and gain() > LEAST_GAIN)


@cache
def gain() -> float:
    """How much faster it is than torch.mm; measured, once, in 30 ms."""
    generator = torch.Generator().manual_seed(0)
    with torch._C.DisableTorchFunction():  # whatever mode a user is in, that makes other tensors
        left, right = (
            torch.randn(SIDE, SIDE, dtype=torch.float32, generator=generator) for _ in range(2)
        )
        return _cpu_seconds(torch.mm, left, right) / _cpu_seconds(mm, left, right)


def _cpu_seconds(call: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> float:
    """Of this thread: others of this machine may be measuring, too."""
    times = []
    for _ in range(1 + REPEATS):
        start_s = time.thread_time()
        call(left, right)
        times.append(time.thread_time() - start_s)
    return min(times[1:])


@cache
def _call() -> Callable[..., Tensor]:
    call: Any = getattr(torch.ops.mkldnn, _NAME).default
    return call._op  # type: ignore[no-any-return]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X [..., k] times the transposed weight [n, k], with bias [n] added to each row."""
    return _call()(x, weight, None if bias is None else bias.contiguous(), "none", (), "")


def mm(left: Tensor, right: Tensor) -> Tensor:
    """Left [m, k] times right [k, n]."""
    return linear(left, right.t())


def addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The same with bias [n] added to each row."""
    return linear(left, right.t(), bias)


def add_mm(total: Tensor | None, is_there: bool, left: Tensor, right: Tensor) -> Tensor:
    """Adds the product to a total [m, n] that is there, writes it to one that is not yet; makes
    one where there is None.

    In blocks of rows: of a product as a whole as much memory would be needed again.
    """
    if total is None:
        return mm(left, right)
    rows = max(1, BLOCK_BYTES // (right.shape[1] * right.itemsize))
    parts, lefts = torch.split(total, rows), torch.split(left, rows)
    for part, of_part in zip(parts, lefts, strict=True):
        product = mm(of_part, right)
        if is_there:
            part.add_(product)
        else:
            part.copy_(product)
        del product  # before the next is made
    return total


# Registration


def _fake_mm(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]))


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return _fake_mm(left, right)


torch.library.define("merakc::linear", "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
torch.library.define("merakc::mm", "(Tensor left, Tensor right) -> Tensor")
torch.library.define("merakc::addmm", "(Tensor bias, Tensor left, Tensor right) -> Tensor")
torch.library.impl("merakc::linear", "cpu", linear)
torch.library.impl("merakc::mm", "cpu", mm)
torch.library.impl("merakc::addmm", "cpu", addmm)
torch.library.register_fake("merakc::linear", _fake_linear)
torch.library.register_fake("merakc::mm", _fake_mm)
torch.library.register_fake("merakc::addmm", _fake_addmm)

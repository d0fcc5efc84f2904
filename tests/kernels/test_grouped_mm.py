"""Products of groups of rows: the definition, its gradients, groups without rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from merakc.kernels import grouped_mm  # noqa: F401  registers the op
from tests.passes.lockstep import relative_error

# rows, groups, width before, width behind; the last row of each group
CASES = [
    ((8, 3, 4, 5), (3, 5, 8)),
    ((8, 3, 4, 5), (0, 8, 8)),  # groups without rows
    ((8, 3, 4, 5), (2, 4, 6)),  # rows behind the last group
    ((4, 1, 3, 2), (4,)),
    ((3, 2, 4, 4), (0, 0)),
]


def case(
    sizes: tuple[int, int, int, int], ends: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    r, g, i, o = sizes
    x = torch.randn(r, i, dtype=dtype, device=device)
    # The layout of a linear layer's weights, [out, in] a group.
    w = torch.randn(g, o, i, dtype=dtype, device=device).transpose(1, 2)
    return x.requires_grad_(), w.requires_grad_(), torch.tensor(ends, device=device)


def by_definition(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Each row times the matrix of the group that it is in; a row in none gives zeros."""
    places = torch.arange(len(x), device=x.device)
    group = torch.searchsorted(offs, places, right=True)
    each = (x.unsqueeze(1) @ w[group.clamp(max=len(w) - 1)]).squeeze(1)
    return each * (group < len(w)).unsqueeze(1)


def compare(x: Tensor, w: Tensor, offs: Tensor, bound: float) -> None:
    """The result, and the gradients of a weighted sum of it."""
    found, wanted = torch.ops.merakc.grouped_mm(x, w, offs), by_definition(x, w, offs)
    tangent = torch.randn_like(wanted)
    assert relative_error(found, wanted) < bound
    own = torch.autograd.grad(found, (x, w), tangent)
    for got, grad in zip(own, torch.autograd.grad(wanted, (x, w), tangent), strict=True):
        assert relative_error(got, grad) < bound


@pytest.mark.parametrize(("sizes", "ends"), CASES)
def test_rows_are_multiplied_with_the_matrix_of_their_group(
    sizes: tuple[int, int, int, int], ends: tuple[int, ...]
) -> None:
    compare(*case(sizes, ends, torch.float64, "cpu"), 1e-14)
    compare(*case(sizes, ends, torch.float32, "cpu"), 1e-5)


def test_it_is_differentiated_again_and_only_where_asked() -> None:
    x, w, offs = case(*CASES[0], torch.float64, "cpu")
    assert torch.autograd.gradcheck(lambda x, w: torch.ops.merakc.grouped_mm(x, w, offs), (x, w))
    frozen = torch.ops.merakc.grouped_mm(x, w.detach(), offs)
    assert torch.autograd.grad(frozen.sum(), x)[0].shape == x.shape


def test_shapes_are_known_without_data() -> None:
    with FakeTensorMode() as mode:
        x, w, offs = (mode.from_tensor(t.detach()) for t in case(*CASES[0], torch.float64, "cpu"))
        assert torch.ops.merakc.grouped_mm(x, w, offs).shape == (8, 5)
        assert torch.ops.merakc.grouped_mm_weights(x, x, offs).shape == (3, 4, 4)
        with pytest.raises(AssertionError):
            torch.ops.merakc.grouped_mm(x, w.transpose(1, 2), offs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("widths", [(64, 32), (64, 30), (36, 32), (7, 5)])
@pytest.mark.parametrize("ends", [(30, 50, 96), (0, 96, 96), (2, 40, 60)])
def test_a_gpu_computes_the_same_also_where_rows_are_not_aligned(
    widths: tuple[int, int], ends: tuple[int, ...]
) -> None:
    args = case((96, 3, *widths), ends, torch.bfloat16, "cuda")
    compare(*args, 2e-2)  # bfloat16 has eight bits
    compare(*case((96, 3, *widths), ends, torch.float64, "cuda"), 1e-13)

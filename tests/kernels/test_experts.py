"""Products of groups of rows, and rows on their way to the groups' ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.ranks import run_ranks
from merakc.kernels import experts
from merakc.kernels.collectives import bind_axis
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


# Rows of each of three ranks for five experts, some for none; and rows behind all groups.
COUNTS = ((3, 0, 1, 2, 0), (0, 0, 0, 0, 0), (1, 4, 0, 0, 2))
OWNED, BEHIND = (2, 2, 1), 2


def _sent_and_back() -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Rows of numbers that say rank and expert, multiplied where the experts are, and gradients."""
    rank = dist.get_rank()
    bind_axis("tp", dist.group.WORLD)
    every = torch.tensor(COUNTS).cumsum(1).int().flatten()
    of = torch.repeat_interleave(torch.arange(5), torch.tensor(COUNTS[rank]))
    x = torch.stack([of, torch.full_like(of, rank)], 1).double()
    x = torch.cat([x, torch.full((BEHIND, 2), 7.0).double()]).requires_grad_()
    here = experts.dispatch(x, every, "tp", OWNED, rank, 99)
    ends = torch.ops.merakc.own_ends(every, OWNED, rank)
    first = sum(OWNED[:rank])
    weights = torch.stack([torch.eye(2) * (k + 1) for k in range(first, first + OWNED[rank])])
    made = torch.ops.merakc.grouped_mm(here, weights.double(), ends)
    back = experts.combine(made, every, "tp", OWNED, rank, len(x))
    (gradient,) = torch.autograd.grad((back * back.detach()).sum(), x)
    return here.detach()[:, 0], back.detach(), gradient, ends.tolist()


def test_rows_are_sent_to_their_experts_and_back() -> None:
    for rank, (here, back, gradient, ends) in enumerate(run_ranks(3, _sent_and_back)):
        owned = range(sum(OWNED[:rank]), sum(OWNED[: rank + 1]))
        counts = [sum(own[k] for own in COUNTS) for k in owned]
        assert ends == torch.tensor(counts).cumsum(0).tolist()
        wanted = torch.repeat_interleave(torch.tensor(list(owned)), torch.tensor(counts))
        assert torch.equal(here.long(), wanted)
        of = torch.repeat_interleave(torch.arange(5.0), torch.tensor(COUNTS[rank])).double()
        assert torch.equal(back[: len(of), 0], of * (of + 1))
        assert torch.equal(back[: len(of), 1], rank * (of + 1))
        assert torch.equal(gradient[: len(of), 0], of * (of + 1) ** 2)
        assert len(back) == len(of) + BEHIND
        assert not back[len(of) :].any()
        assert not gradient[len(of) :].any()

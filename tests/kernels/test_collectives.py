"""The collectives on forked gloo ranks: values, conjugate gradients, layouts, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.kernels.collectives import (
    all_gather,
    all_reduce,
    all_reduce_now,
    axis_group,
    bind_axis,
    copy_to,
    gather_into,
    gather_to,
    reduce_scatter,
    scatter,
    scatter_single,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    unbind_axes,
)
from tests.kernels.bound import bind

SIZES = (2, 0, 3)  # of the gathered dim, one a rank


def _part(rank: int, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _reduce_all_ways(dtype: torch.dtype) -> list[Tensor]:
    x = _part(bind("tp"), dtype=dtype)
    before = x.clone()
    pending = start_all_reduce(x.t(), "tp", "sum")
    results = [all_reduce(x, "tp"), all_reduce_now(x, "tp", "sum"), pending.wait().t()]
    results += [all_reduce(x, "tp", "max"), all_reduce_now(x, "tp", "max")]
    assert torch.equal(x, before)
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_reduce_values(ranks: int, dtype: torch.dtype) -> None:
    parts = torch.stack([_part(rank, dtype=dtype) for rank in range(ranks)])
    for results in run_ranks(ranks, _reduce_all_ways, dtype):
        assert all(torch.equal(x, parts.sum(0)) for x in results[:3])
        assert all(torch.equal(x, parts.amax(0)) for x in results[3:])


def _conjugate_grads() -> tuple[Tensor, Tensor]:
    rank = bind("tp")
    x = _part(rank).requires_grad_()
    weights = _part(10 + rank)
    (through_f,) = torch.autograd.grad((copy_to(x, "tp") * weights).sum(), x)
    (through_g,) = torch.autograd.grad((all_reduce(x, "tp") * weights).sum(), x)
    return through_f, through_g


def test_gradients_of_conjugate_pair() -> None:
    weights = [_part(10), _part(11)]
    for rank, (through_f, through_g) in enumerate(run_ranks(2, _conjugate_grads)):
        assert torch.equal(through_f, weights[0] + weights[1])
        assert torch.equal(through_g, weights[rank])


def _two_layers() -> list[Tensor]:
    """Megatron's pair of linears: columns, then rows, on this rank's half."""
    rank = bind("tp")
    x, first, second = (_part(seed, (4, 4)).requires_grad_() for seed in (1, 2, 3))
    half = slice(2 * rank, 2 * rank + 2)
    hidden = (copy_to(x, "tp") @ first[:, half]).relu()
    out = all_reduce(hidden @ second[half], "tp")
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, first, second))]


def test_megatron_layers_equal_one_process() -> None:
    x, first, second = (_part(seed, (4, 4)).requires_grad_() for seed in (1, 2, 3))
    out = (x @ first).relu() @ second
    dx, dfirst, dsecond = torch.autograd.grad(out.square().sum(), (x, first, second))
    results = run_ranks(2, _two_layers)
    for result in results:
        torch.testing.assert_close(result[0], out.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result[1], dx, rtol=1e-12, atol=1e-12)
    summed = [results[0][i] + results[1][i] for i in (2, 3)]  # each rank's own half, else zeros
    torch.testing.assert_close(summed, [dfirst, dsecond], rtol=1e-12, atol=1e-12)


def _gather(dim: int) -> tuple[Tensor, Tensor]:
    rank = bind("tp")
    shape = (SIZES[rank], 4) if dim == 0 else (4, SIZES[rank])
    x = _part(rank, shape).requires_grad_()
    out = all_gather(x, "tp", dim, SIZES, rank)
    assert out.is_contiguous()
    (grad,) = torch.autograd.grad((out * torch.arange(20.0).view(out.shape)).sum(), x)
    return out.detach(), grad


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_of_uneven_sizes(dim: int) -> None:
    parts = [_part(r, (n, 4) if dim == 0 else (4, n)) for r, n in enumerate(SIZES)]
    weights = torch.arange(20.0).view((5, 4) if dim == 0 else (4, 5)).double()
    slices = torch.split_with_sizes(weights, SIZES, dim)
    for rank, (out, grad) in enumerate(run_ranks(3, _gather, dim)):
        assert torch.equal(out, torch.cat(parts, dim))
        assert torch.equal(grad, slices[rank])


def _strides(dim: int) -> tuple[int, ...]:
    shape = [3, 4, 5]
    shape[dim] = 1
    return all_gather(_part(bind("tp"), tuple(shape)), "tp", dim, [1, 1], dist.get_rank()).stride()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gathered_elements_are_contiguous(dim: int) -> None:
    shape = [3, 4, 5]
    shape[dim] = 2
    assert run_ranks(2, _strides, dim) == [torch.empty(shape).stride()] * 2


def _gathered() -> list[Tensor]:
    rank, found = bind("tp"), list[Tensor]()
    group = axis_group("tp")
    for dtype in (torch.bool, torch.bfloat16, torch.int64, torch.complex64):
        own = torch.full((2,), rank).to(dtype)
        gather_into(whole := torch.zeros(6, dtype=dtype), own, group).wait()
        gather_into(again := torch.zeros(3, 2, dtype=dtype), own, group).wait()
        found += [whole, again.flatten()]
    within = torch.zeros(6)
    own = within.chunk(3)[rank].fill_(rank)  # a view of the whole
    works = gather_into(within, own, group), gather_into(torch.empty(0), torch.empty(0), group)
    works[1].wait()
    works[0].wait()
    assert all(work.is_completed() for work in works)
    return [*found, within]


def test_parts_of_any_kind_are_gathered() -> None:
    for rank in run_ranks(3, _gathered):
        for found in rank:
            assert torch.equal(found, torch.tensor([0, 0, 1, 1, 2, 2]).to(found.dtype))


def test_calls_go_by_their_newer_names() -> None:
    newer = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    assert scatter_single is newer


def _parts(dim: int, sizes: tuple[int, ...]) -> list[Tensor]:
    """Reduce-scatter, scatter and gather, each with the gradient of a weighted sum."""
    rank = bind("tp")
    found: list[Tensor] = []
    for op, shape in (
        (reduce_scatter, _shape(sum(sizes), dim)), (scatter, _shape(sum(sizes), dim)),
        (gather_to, _shape(sizes[rank], dim)),
    ):  # fmt: skip
        x = _part(0 if op is scatter else rank, shape).requires_grad_()
        out = op(x, "tp", dim, sizes, rank)
        assert out.is_contiguous()
        weights = _part(10 + rank, tuple(out.shape))
        found += [out.detach(), *torch.autograd.grad((out * weights).sum(), x)]
    return found


def _shape(size: int, dim: int) -> tuple[int, ...]:
    return (size, 4) if dim == 0 else (4, size)


@pytest.mark.parametrize("sizes", [SIZES, (2, 2, 2)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_conjugates_on_parts(dim: int, sizes: tuple[int, ...]) -> None:
    ranks = run_ranks(3, _parts, dim, sizes)
    summed = torch.stack([_part(r, _shape(sum(sizes), dim)) for r in range(3)]).sum(0)
    slices = [_part(10 + r, _shape(n, dim)) for r, n in enumerate(sizes)]
    gathered = torch.cat(slices, dim)
    wholes = torch.stack([_part(10 + r, _shape(sum(sizes), dim)) for r in range(3)]).sum(0)
    inputs = torch.cat([_part(r, _shape(n, dim)) for r, n in enumerate(sizes)], dim)
    for rank, found in enumerate(ranks):
        own = [
            t.split_with_sizes(sizes, dim)[rank]
            for t in (summed, _part(0, _shape(sum(sizes), dim)))
        ]
        wanted = [own[0], gathered, own[1], gathered, inputs]
        torch.testing.assert_close(found[:5], wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[5], wholes.split_with_sizes(sizes, dim)[rank])


def _traced() -> bool:
    rank = bind("tp")

    def loss_grads(x: Tensor) -> tuple[Tensor, ...]:
        gathered = all_gather(copy_to(x.t(), "tp"), "tp", 0, (3, 3), rank)
        loss = all_reduce(gathered, "tp").view(-1).square().sum()
        return loss, *torch.autograd.grad(loss, (x,))

    x = _part(rank).requires_grad_()
    graph = make_fx(loss_grads, tracing_mode="fake")(x)
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count("merakc.copy_to.default") == 1
    assert targets.count("merakc.all_reduce.default") == 2  # and that of copy_to's backward
    assert targets.count("merakc.all_gather.default") == 1
    pairs = zip(graph(x.detach()), loss_grads(x), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_trace_of_forward_and_backward_runs() -> None:
    assert all(run_ranks(2, _traced))


def _opcheck_and_gradcheck() -> None:
    rank = bind("tp")
    x = _part(rank).t().requires_grad_()
    ops: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.merakc.all_reduce.default, (x, "tp", "sum")),
        (torch.ops.merakc.copy_to.default, (x, "tp")),
        (torch.ops.merakc.all_gather.default, (x, "tp", 1, (2,), rank)),
        (torch.ops.merakc.gather_to.default, (x, "tp", 1, (2,), rank)),
        (torch.ops.merakc.reduce_scatter.default, (x, "tp", 1, (2,), rank)),
        (torch.ops.merakc.scatter.default, (x, "tp", 1, (2,), rank)),
    ]
    for op, args in ops:
        torch.library.opcheck(op, args)
        assert torch.autograd.gradcheck(lambda x, op=op, args=args: op(x, *args[1:]), (x,))


def test_opcheck_and_gradcheck() -> None:
    run_ranks(1, _opcheck_and_gradcheck)


def _axes() -> list[Tensor]:
    """Two axes of a 2 x 2 mesh, bound at once; then one of them bound anew."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    bind_axis("tp", rows[rank // 2])
    bind_axis("dp", columns[rank % 2])
    assert axis_group("tp") is rows[rank // 2]
    x = torch.tensor([10.0**rank])
    return [all_reduce(x, "tp"), all_reduce(x, "dp")]


def test_axes_have_groups_of_their_own() -> None:
    values = [[x.item() for x in result] for result in run_ranks(4, _axes)]
    assert values == [[11.0, 101.0], [11.0, 1010.0], [1100.0, 101.0], [1100.0, 1010.0]]


def _started() -> list[bool]:
    """Several at once, waited for in another order, against one after the other."""
    rank = bind("tp")
    x, wide, sizes = _part(rank), _part(rank, (5, 4)), (2, 3)
    own = _part(rank, (sizes[rank], 4))
    pending = [
        start_all_reduce(x, "tp", "max"),
        start_all_gather(own, "tp", 0, sizes, rank),
        start_reduce_scatter(wide, "tp", 0, sizes, rank),
        start_all_reduce(wide, "tp", "sum"),
    ]
    wanted = [
        all_reduce(x, "tp", "max"),
        all_gather(own, "tp", 0, sizes, rank),
        reduce_scatter(wide, "tp", 0, sizes, rank),
        all_reduce(wide, "tp"),
    ]
    kept = x.clone(), wide.clone()
    found = [p.wait() for p in reversed(pending)][::-1]
    same = [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)]
    return [*same, torch.equal(x, kept[0]), torch.equal(wide, kept[1])]


def test_collectives_in_flight_together() -> None:
    assert run_ranks(2, _started) == [[True] * 6] * 2


@pytest.mark.parametrize("call", [all_reduce, all_reduce_now, start_all_reduce])
def test_unbound_axis_is_refused(call: Any) -> None:
    with pytest.raises(ConfigError, match=r"axis 'tp' has no process group \(bound axes: none\)"):
        call(torch.ones(1), "tp", "sum")


def _unbind() -> None:
    bind("tp")
    unbind_axes()
    axis_group("tp")


def test_unbind_axes() -> None:
    with pytest.raises(RuntimeError, match="bind_axis"):
        run_ranks(1, _unbind)


def _wrong_sizes() -> str:
    rank = bind("tp")
    try:
        all_gather(_part(rank), "tp", 0, (2, 1, 2), rank)
    except AssertionError:
        return "refused"
    return "taken"


def test_wrong_sizes_are_refused() -> None:
    assert run_ranks(2, _wrong_sizes) == ["refused", "refused"]


def _max_grad() -> None:
    x = _part(bind("tp")).requires_grad_()
    torch.autograd.grad(all_reduce(x, "tp", "max").sum(), x)


def test_maximum_has_no_gradient() -> None:
    with pytest.raises(RuntimeError, match="no gradient"):
        run_ranks(1, _max_grad)

"""Products beside collectives on forked gloo ranks: against plain products of the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.ranks import run_ranks
from merakc.kernels import products
from merakc.kernels.collectives import watched
from merakc.kernels.products import gather_matmul, has_symmetric_memory, matmul_scatter, pipelines
from tests.kernels.bound import bind

BOUND = 1e-10
INNER, WIDTHS = 4, (3, 5, 2)
# Rows of each of two ranks, in the dim that is gathered; what stands before and behind it.
CASES = [((3, 3), (), ()), ((2, 3), (), ()), ((3, 3), (2,), ()), ((2, 2), (), (3,)),
         ((1, 3), (2,), (2,))]  # fmt: skip


def _random(seed: int, *shape: int) -> Tensor:
    pick = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=pick, dtype=torch.float64)


def _weights(rank: int, turned: bool, widths: tuple[int, ...] = WIDTHS) -> list[Tensor]:
    shapes = [(o, INNER) if turned else (INNER, o) for o in widths]
    return [_random(100 + 10 * rank + k, *shape) for k, shape in enumerate(shapes)]


Case = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _part(rank: int, case: Case) -> Tensor:
    sizes, before, behind = case
    return _random(rank, *before, sizes[rank], *behind, INNER)


def _factors(rank: int, outs: list[Tensor]) -> list[Tensor]:
    """What a rank's outputs count in its loss."""
    return [_random(1000 + 10 * rank + k, *out.shape) for k, out in enumerate(outs)]


def _loss(rank: int, outs: list[Tensor], read: tuple[int, ...]) -> Tensor:
    factors = _factors(rank, outs)
    return torch.stack([(outs[k] * factors[k]).sum() for k in read]).sum()


def _gathered(case: Case, turned: bool, read: tuple[int, ...]) -> tuple[list[Tensor], ...]:
    rank = bind("tp")
    x = _part(rank, case).requires_grad_()
    weights = [w.requires_grad_() for w in _weights(rank, turned)]
    outs = gather_matmul(x, weights, turned, "tp", len(case[1]), case[0], rank)
    assert all(out.is_contiguous() for out in outs)
    grads = torch.autograd.grad(
        _loss(rank, outs, read), [x, *weights], allow_unused=True, materialize_grads=True
    )
    return [out.detach() for out in outs], list(grads)


def _plain(whole: Tensor, rank: int, turned: bool) -> tuple[list[Tensor], list[Tensor]]:
    """A rank's outputs on the whole, and its weights."""
    weights = [w.requires_grad_() for w in _weights(rank, turned)]
    return [whole, *(whole @ (w.t() if turned else w) for w in weights)], weights


# All products; some of them; the whole as well; the whole alone.
READ = [(1, 2, 3), (2,), (0, 1, 3), (0,)]


def _all_gathered() -> dict[Any, tuple[list[Tensor], ...]]:
    every = product(CASES, (False, True), READ)
    return {(case, turned, read): _gathered(case, turned, read) for case, turned, read in every}


@cache
def _ran(on_ranks: Callable[[], dict[Any, Any]]) -> list[dict[Any, Any]]:
    """What two ranks give for all cases, run once."""
    return run_ranks(2, on_ranks)


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gather_and_products_equal_those_of_the_whole(
    case: Case, turned: bool, read: tuple[int, ...]
) -> None:
    parts = [_part(rank, case).requires_grad_() for rank in (0, 1)]
    whole = torch.cat(parts, len(case[1]))
    plain = [_plain(whole, rank, turned) for rank in (0, 1)]
    losses = torch.stack([_loss(rank, outs, read) for rank, (outs, _) in enumerate(plain)])
    for rank, every in enumerate(_ran(_all_gathered)):
        outs, grads = every[case, turned, read]
        own, weights = plain[rank]
        _assert_close(outs, own)
        wanted = torch.autograd.grad(
            losses.sum(), [parts[rank], *weights], retain_graph=True, allow_unused=True,
            materialize_grads=True,
        )  # fmt: skip
        _assert_close(grads, wanted)


def _assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(list(found), list(wanted), rtol=BOUND, atol=BOUND)


def _whole_input(rank: int, case: Case) -> Tensor:
    sizes, before, behind = case
    return _random(50 + rank, *before, sum(sizes), *behind, INNER)


def _scattered(case: Case, turned: bool) -> list[Tensor]:
    rank = bind("tp")
    x = _whole_input(rank, case).requires_grad_()
    weight = _weights(rank, turned)[0].requires_grad_()
    out = matmul_scatter(x, weight, turned, "tp", len(case[1]), case[0], rank)
    assert out.is_contiguous()
    grads = torch.autograd.grad(_loss(rank, [out], (0,)), [x, weight])
    (alone,) = torch.autograd.grad(
        _loss(rank, [matmul_scatter(x.detach(), weight, turned, "tp", len(case[1]), case[0], rank)],
              (0,)), [weight],
    )  # fmt: skip
    return [out.detach(), *grads, alone]


def _all_scattered() -> dict[Any, list[Tensor]]:
    every = product(CASES, (False, True))
    return {(case, turned): _scattered(case, turned) for case, turned in every}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_products_that_are_scattered_equal_their_sum(case: Case, turned: bool) -> None:
    inputs = [_whole_input(rank, case).requires_grad_() for rank in (0, 1)]
    weights = [_weights(rank, turned)[0].requires_grad_() for rank in (0, 1)]
    pairs = zip(inputs, weights, strict=True)
    total = torch.stack([x @ (w.t() if turned else w) for x, w in pairs]).sum(0)
    parts = total.split_with_sizes(case[0], len(case[1]))
    loss = torch.stack([_loss(rank, [part], (0,)) for rank, part in enumerate(parts)]).sum()
    for rank, every in enumerate(_ran(_all_scattered)):
        found = every[case, turned]
        of_x, of_w = torch.autograd.grad(loss, [inputs[rank], weights[rank]], retain_graph=True)
        _assert_close(found, [parts[rank], of_x, of_w, of_w])


def _traced_ops() -> list[str]:
    """The ops of a forward and backward through both, as they are traced."""
    rank = bind("tp")

    def grads(x: Tensor, v: Tensor, w: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        _, one, two = gather_matmul(x, [v, w], True, "tp", 0, (3, 3), rank)
        out = matmul_scatter(one * two, z, True, "tp", 0, (3, 3), rank)
        return torch.autograd.grad(out.square().sum(), (x, v, w, z))

    shapes = [(3, INNER), (6, INNER), (6, INNER), (INNER, 6)]
    given = [_random(k, *shape).requires_grad_() for k, shape in enumerate(shapes)]
    traced = make_fx(grads, tracing_mode="fake")(*given)
    pairs = zip(traced(*[x.detach() for x in given]), grads(*given), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    calls = (n for n in traced.graph.nodes if n.op == "call_function")
    return [str(n.target) for n in calls if "merakc" in str(n.target)]


def test_the_backward_is_made_of_the_same_ops() -> None:
    gather, scatter = "merakc.gather_matmul.default", "merakc.matmul_scatter.default"
    assert run_ranks(2, _traced_ops) == [[gather, scatter, gather, scatter]] * 2


def _opcheck() -> None:
    bind("tp")
    x, weights = _random(0, 2, INNER).requires_grad_(), _weights(0, False)
    place = (False, "tp", 0, (2,), 0)
    torch.library.opcheck(torch.ops.merakc.gather_matmul.default, (x, weights, *place))
    torch.library.opcheck(torch.ops.merakc.matmul_scatter.default, (x, weights[0], *place))


def test_opcheck() -> None:
    run_ranks(1, _opcheck)


def _told() -> list[tuple[str, int]]:
    """What a watcher sees."""
    rank = bind("tp")
    seen: list[tuple[str, int]] = []

    def watch(op: str, axis: str, size_bytes: int, issue: Any) -> Any:
        seen.append((op, size_bytes))
        return issue()

    with watched(watch):
        case: Case = ((3, 3), (), ())
        gather_matmul(_part(rank, case), _weights(rank, False), False, "tp", 0, (3, 3), rank)
        x, weight = _whole_input(rank, case), _weights(rank, False)[0]
        matmul_scatter(x, weight, False, "tp", 0, (3, 3), rank)
    return seen


def test_watchers_see_their_collectives() -> None:
    wanted = [("all_gather", 6 * INNER * 8), ("reduce_scatter", 6 * WIDTHS[0] * 8)]
    assert run_ranks(2, _told) == [wanted] * 2


def _through_torch(case: Case, turned: bool) -> list[list[str]]:
    """Both ops by torch's own reference of its fused ops, as where memory is symmetric."""
    called: list[str] = []
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        reference = getattr(symmetric_memory, f"_{name}_fallback")

        def run(*args: Any, name: str = name, reference: Any = reference, **kwargs: Any) -> Any:
            called.append(name)
            return reference(*args, **kwargs)

        torch.library.impl(f"symm_mem::{name}", "cpu", run)
    plain = [*_gathered(case, turned, (1, 2, 3))[1], *_scattered(case, turned)]
    assert not called
    with mock.patch.object(products, "pipelines", return_value=True):
        fused = [*_gathered(case, turned, (1, 2, 3))[1], *_scattered(case, turned)]
    _assert_close(fused, plain)
    return [called]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", [case for case in CASES if len(set(case[0])) == 1])
def test_torchs_fused_ops_compute_the_same(case: Case, turned: bool) -> None:
    gather, scatter = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
    for (called,) in run_ranks(2, _through_torch, case, turned):
        # a gather and its backward, a scatter and its backward, one without a gradient of x
        assert called == [gather, scatter, scatter, gather, scatter]


def test_only_even_parts_on_gpus_are_pipelined() -> None:
    x = torch.zeros(2, INNER)
    assert not pipelines(x, "tp", (2, 2))
    fake = mock.Mock(device=torch.device("cuda"), dtype=torch.bfloat16)
    with (
        mock.patch.object(products, "axis_group"),
        mock.patch.object(products, "has_symmetric_memory", return_value=True) as asked,
    ):
        assert pipelines(fake, "tp", (2, 2))
        assert asked.call_count == 1
        assert not pipelines(fake, "tp", (2, 3))
        fake.dtype = torch.float64
        assert not pipelines(fake, "tp", (2, 2))
        assert asked.call_count == 1


def _symmetric(hosts: tuple[str, str], capable: tuple[bool, bool], maps: bool) -> tuple[bool, int]:
    """What a group finds of its memory, and how often it asked torch, in two calls."""
    rank = bind("tp")
    group = dist.group.WORLD
    assert group is not None
    asked: list[str] = []
    capability = (9, 0) if capable[rank] else (7, 0)

    def workspace(name: str, min_size: int) -> None:
        asked.append(name)
        if not maps and rank:
            raise RuntimeError("no links")

    with (
        mock.patch("socket.gethostname", return_value=hosts[rank]),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch.object(symmetric_memory, "get_symm_mem_workspace", workspace),
    ):  # fmt: skip
        cpu = torch.device("cpu")
        found = {has_symmetric_memory(group, cpu) for _ in range(2)}
    (one,) = found
    return one, len(asked)


@pytest.mark.parametrize(
    ("hosts", "capable", "maps", "wanted"),
    [
        (("a", "a"), (True, True), True, (True, 1)),
        (("a", "b"), (True, True), True, (False, 0)),
        (("a", "a"), (True, False), True, (False, 0)),
        (("a", "a"), (False, False), True, (False, 0)),
        (("a", "a"), (True, True), False, (False, 1)),  # one of them cannot
    ],
)
def test_all_ranks_find_the_same_of_their_memory(
    hosts: tuple[str, str], capable: tuple[bool, bool], maps: bool, wanted: tuple[bool, int]
) -> None:
    assert run_ranks(2, _symmetric, hosts, capable, maps) == [wanted] * 2

from __future__ import annotations

import pytest
import torch

from merakc.kernels import collectives, vocabulary
from merakc.kernels.attention import attention
from merakc.kernels.bindings import BINDINGS
from merakc.kernels.ops import (
    COMPOSITES,
    DIRECT,
    STARTED,
    STARTS,
    WAIT,
    compiled_call,
    is_pointwise,
    makes_tensor,
    resolve_op,
    returns_list,
    returns_view,
    uses_autograd,
)


def test_resolution() -> None:
    assert resolve_op("aten.add.Tensor") is torch.ops.aten.add.Tensor
    assert resolve_op("merakc.dropout.default") is torch.ops.merakc.dropout.default
    name = "composite.vocab_parallel_embedding"
    assert resolve_op(name) is vocabulary.vocab_parallel_embedding
    with pytest.raises(AttributeError):
        resolve_op("aten.no_such_op.default")


@pytest.mark.parametrize(
    ("op", "makes"),
    [
        ("aten.arange.start", True),
        ("aten.full.default", True),
        ("aten.full_like.default", False),
        ("aten.add.Tensor", False),
        ("aten.stack.default", False),
        ("merakc.attention.default", False),
        ("composite.vocab_parallel_embedding", False),
    ],
)
def test_ops_that_make_tensors_from_nothing(op: str, makes: bool) -> None:
    assert makes_tensor(op) is makes


@pytest.mark.parametrize(
    ("op", "view"),
    [
        ("aten.view.default", True),
        ("aten.reshape.default", True),
        ("aten.expand.default", True),
        ("aten.t.default", True),
        ("aten.split.Tensor", True),
        ("aten._unsafe_view.default", True),  # compiled graphs reshape
        ("aten.mm.default", False),
        ("aten.clone.default", False),
        ("merakc.all_reduce.default", False),
        ("composite.vocab_parallel_embedding", True),
        ("function.Mine.module", True),
    ],
)
def test_views(op: str, view: bool) -> None:
    assert returns_view(op) is view


@pytest.mark.parametrize(
    ("op", "pointwise"),
    [
        ("aten.add.Tensor", True),
        ("aten.silu_backward.default", True),
        ("aten._to_copy.default", True),
        ("aten.sum.default", False),
        ("aten.mm.default", False),
        ("aten.bernoulli.p", False),  # another draw every time
        ("merakc.dropout.default", False),
    ],
)
def test_calls_of_each_element(op: str, pointwise: bool) -> None:
    assert is_pointwise(op) is pointwise


def test_every_name_resolves() -> None:
    for op in (*COMPOSITES, *DIRECT, *STARTS, *STARTED, WAIT):
        assert callable(resolve_op(op))


def test_direct_calls_compute_the_same() -> None:
    assert DIRECT["merakc.all_reduce.default"] is collectives.all_reduce_now
    torch.manual_seed(0)
    seed, first = torch.tensor(3), torch.tensor(0)
    x = torch.randn(2, 6)
    args = (x, seed, first, 0.5, 1, 0, [2, 6], [0, 0], [2, 6])
    dropped = DIRECT["merakc.dropout.default"](*args)
    assert torch.equal(dropped, torch.ops.merakc.dropout(*args))
    q, k, v = (torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, None, True)
    with torch.no_grad():
        found, logsumexp = DIRECT["merakc.attention.default"](q, k, v, None, True, 8**-0.5)
        assert torch.equal(found, out)
        grads = DIRECT["merakc.attention_backward.default"](
            torch.ones_like(out), q, k, v, found, logsumexp, None, True, 8**-0.5
        )
    for own, wanted in zip(grads, torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(own, wanted)


def test_the_shortest_call_of_an_op() -> None:
    assert compiled_call("merakc.opaque.default") is DIRECT["merakc.opaque.default"]
    assert compiled_call("aten.mm.default") is BINDINGS["aten.mm.default"]
    assert not DIRECT.keys() & BINDINGS.keys()
    x = torch.randn(3)
    erfinv = compiled_call("aten.erfinv.default")
    assert torch.equal(erfinv(x * 0.1), torch.erfinv(x * 0.1))


@pytest.mark.parametrize(
    ("op", "may"),
    [
        ("aten.mm.default", False),
        ("merakc.all_reduce.default", False),
        ("merakc.attention.default", False),
        ("merakc.attention_backward.default", False),
        ("merakc.opaque.default", True),
        ("merakc.opaque_backward.default", True),
        (STARTS["merakc.all_reduce.default"], False),
        (WAIT, False),
        ("somebody.own_op.default", True),
        ("composite.vocab_parallel_embedding", True),
    ],
)
def test_who_may_differentiate(op: str, may: bool) -> None:
    assert uses_autograd(op) is may


def test_group_norms_take_tensors_of_any_layout() -> None:
    x, weight = torch.randn(2, 5, 6).mT, torch.randn(6)  # [2, 6, 5], not contiguous
    args = (weight, torch.zeros(6), 2, 6, 5, 3, 1e-5)
    out, mean, rstd = DIRECT["aten.native_group_norm.default"](x, *args)
    wanted = torch.nn.functional.group_norm(x, 3, weight)
    assert torch.allclose(out, wanted)
    grad = torch.randn(2, 5, 6).mT
    backward = DIRECT["aten.native_group_norm_backward.default"]
    found = backward(grad, x, mean, rstd, weight, 2, 6, 5, 3, (True, True, True))
    leaf = x.detach().requires_grad_()
    torch.nn.functional.group_norm(leaf, 3, weight).backward(grad)
    assert torch.allclose(found[0], leaf.grad, atol=1e-5)


def test_halves_of_collectives_return_one_thing_of_its_own() -> None:
    assert STARTS.keys() == set(STARTED.values())
    for op in (*STARTED, WAIT):
        assert not returns_list(op)
        assert not returns_view(op)
        assert not makes_tensor(op)
    assert returns_list("aten.split.Tensor")

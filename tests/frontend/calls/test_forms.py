"""Results by the forms of arguments: those that torch gives, told apart where they differ."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from merakc.frontend.calls.forms import (
    FOLLOWING,
    Forms,
    is_plain_fake,
    make_fake,
    make_meta,
    run_bare,
)
from merakc.kernels.ops import resolve_op

aten = torch.ops.aten


class Counted:
    """An op that counts its calls."""

    def __init__(self, func: Any) -> None:
        self.func, self.times = func, 0
        self._schema = func._schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return self.func(*args, **kwargs)

    def __str__(self) -> str:
        return str(self.func)


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(allow_non_fake_inputs=True) as found:
        yield found


def forms_of(mode: FakeTensorMode, bare: Any = None) -> Forms:
    return Forms(partial(make_fake, mode), is_plain_fake, views=True, bare=bare)


def looks(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad


FRESH = {
    "a product": (aten.mm.default, lambda: (torch.ones(2, 3), torch.ones(4, 3).t()), {}),
    "numbers": (aten.clamp.default, lambda: (torch.ones(2, 3), 0.5), {"max": 2}),
    "kept strides": (aten.abs.default, lambda: (torch.ones(4, 3).t(),), {}),
    "a pair": (aten.max.dim, lambda: (torch.ones(2, 3), 1), {}),
    "a list of tensors": (aten.cat.default, lambda: ([torch.ones(2), torch.ones(3)],), {}),
    "a dtype": (aten._to_copy.default, lambda: (torch.ones(2),), {"dtype": torch.float64}),
    "none given": (aten.zeros.default, lambda: ([2, 3],), {"dtype": torch.int64}),
}


@pytest.mark.parametrize("what", FRESH)
def test_a_call_like_an_earlier_one_is_not_run_and_returns_the_same(
    what: str, mode: FakeTensorMode
) -> None:
    func, args, kwargs = FRESH[what]
    call, forms = Counted(func), forms_of(mode)
    wanted = func(*args(), **kwargs)
    found = [forms.run(call, args(), dict(kwargs)) for _ in range(3)]
    assert call.times == 1
    for out in found:
        assert type(out) is type(wanted)
        pairs = zip(
            out if isinstance(out, tuple) else (out,),
            wanted if isinstance(wanted, tuple) else (wanted,),
            strict=True,
        )
        assert all(looks(a) == looks(b) for a, b in pairs)


def test_results_are_new_each_time(mode: FakeTensorMode) -> None:
    forms, x = forms_of(mode), torch.ones(2)
    outs = [forms.run(aten.neg.default, (x,), {}) for _ in range(3)]
    assert len({out.untyped_storage()._cdata for out in outs}) == 3


@pytest.mark.parametrize("which", ["transpose", "select", "split"])
def test_views_are_views_of_their_own_argument(which: str, mode: FakeTensorMode) -> None:
    func, rest = {
        "transpose": (aten.transpose.int, (0, 1)),
        "select": (aten.select.int, (0, 1)),
        "split": (aten.split.Tensor, (2, 1)),
    }[which]
    call, forms = Counted(func), forms_of(mode)
    for _ in range(3):
        x = torch.ones(4, 6)
        out, wanted = forms.run(call, (x, *rest), {}), func(x, *rest)
        outs, others = (out, wanted) if isinstance(out, list) else ((out,), (wanted,))
        for own, other in zip(outs, others, strict=True):
            assert looks(own) == looks(other)
            assert own.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert call.times == 1


def test_calls_that_differ_are_told_apart(mode: FakeTensorMode) -> None:
    x, forms = torch.ones(3, dtype=torch.int64), forms_of(mode)
    found = [forms.run(aten.mul.Tensor, (x, number), {}).dtype for number in (1, 1.0, True)]
    assert found == [torch.int64, torch.float32, torch.int64]
    rows = [forms.run(aten.relu.default, (torch.ones(n),), {}).shape for n in (2, 3)]
    assert rows == [(2,), (3,)]
    flat, turned = torch.ones(3, 2), torch.ones(2, 3).t()
    strides = [forms.run(aten.relu.default, (y,), {}).stride() for y in (flat, turned)]
    assert strides == [(2, 1), (1, 3)]


def test_a_call_that_writes_is_run(mode: FakeTensorMode) -> None:
    call, forms, x = Counted(aten.add_.Tensor), forms_of(mode), torch.ones(2)
    assert all(forms.run(call, (x, 1), {}) is x for _ in range(3))
    assert call.times == 3


def test_what_a_conjugate_becomes_is_not_taken_for_that_of_a_plain_tensor(
    mode: FakeTensorMode,
) -> None:
    x, forms = torch.ones(2, 3, dtype=torch.complex64), forms_of(mode)
    conjugate = aten._conj.default(x)
    assert not forms.run(aten.t.default, (x,), {}).is_conj()
    assert forms.run(aten.t.default, (conjugate,), {}).is_conj()
    assert all(forms.run(aten._conj.default, (x,), {}).is_conj() for _ in range(2))


def test_a_tensor_with_a_value_counts_as_itself() -> None:
    forms = Forms(make_meta, lambda x: x.is_meta)
    x, call = torch.ones(2, device="meta"), Counted(aten.mul.Tensor)
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    for other in (one, two, one):
        assert forms.run(call, (x, other), {}).is_meta
    assert call.times == 2
    known = Counted(aten.add.Tensor)
    assert [forms.run(known, (one, one), {}).item() for _ in range(2)] == [2.0, 2.0]
    assert known.times == 2


def test_known_tensors_of_no_elements_are_alike(mode: FakeTensorMode) -> None:
    call, forms, x = Counted(aten.cat.default), forms_of(mode), torch.ones(2, 3)
    for dtype in (torch.float32, torch.float32, torch.float64):
        empty = torch.tensor([], dtype=dtype)
        assert isinstance(empty, FakeTensor)
        assert empty.constant is not None
        found = forms.run(call, ([empty, x], -1), {})
        assert looks(found) == looks(torch.cat([empty, x], -1))
    assert call.times == 2


def test_a_made_tensor_is_fake() -> None:
    found = make_fake(FakeTensorMode(), ((2, 3), (1, 2), 0, torch.float64))
    assert isinstance(found, FakeTensor)
    assert found.device.type == "cpu"
    assert (found.stride(), found.dtype) == ((1, 2), torch.float64)


def wide() -> Tensor:
    return torch.ones(1, 4, 6, 8).transpose(1, 2)


def flat() -> Tensor:
    return torch.ones(6, 8)


POINTWISE = ("add.Tensor", "div.Tensor", "mul.Tensor", "sub.Tensor")
UNARY = ("gelu.default", "logical_not.default", "neg.default", "relu.default", "rsqrt.default",
         "silu.default", "tanh.default")  # fmt: skip
CALLS: dict[str, list[Any]] = {
    **{name: [lambda: (wide(), 2.0), lambda: (wide(), torch.ones(8)),
              lambda: (wide(), torch.ones(1, 6, 4, 8))] for name in POINTWISE},
    **{name: [lambda: (wide(),)] for name in UNARY},
    "addmm.default": [lambda: (torch.ones(3), flat(), torch.ones(3, 8).t())],
    "bmm.default": [lambda: (torch.ones(2, 3, 4), torch.ones(2, 5, 4).transpose(1, 2))],
    "cat.default": [lambda: ([wide(), wide()], -1)],
    "constant_pad_nd.default": [lambda: (wide(), [0, 1], 0.0)],
    "contiguous.default": [lambda: (wide(),), lambda: (flat(),)],
    "cross_entropy_loss.default": [lambda: (flat(), torch.zeros(6, dtype=torch.long))],
    "embedding.default": [lambda: (flat(), torch.zeros(2, 3, dtype=torch.long))],
    "expand.default": [lambda: (torch.ones(1, 1, 8), [4, -1, 8])],
    "layer_norm.default": [lambda: (wide(), [8], torch.ones(8), torch.ones(8))],
    "linear.default": [lambda: (wide(), torch.ones(3, 8)),
                       lambda: (torch.ones(2, 4, 8), torch.ones(3, 8), torch.ones(3))],
    "masked_fill.Scalar": [lambda: (wide(), torch.ones(1, 6, 4, 1, dtype=torch.bool), 0.0),
                           lambda: (torch.ones(8), wide() > 0, -1.5)],
    "matmul.default": [lambda: (wide(), torch.ones(1, 6, 8, 4)), lambda: (wide(), flat().t())],
    "mean.dim": [lambda: (wide(), [-1], True), lambda: (wide(), [1])],
    "mm.default": [lambda: (flat(), flat().t())],
    "permute.default": [lambda: (wide(), [0, 2, 1, 3])],
    "pow.Tensor_Scalar": [lambda: (wide(), 3.0)],
    "reshape.default": [lambda: (wide(), [6, -1]), lambda: (flat(), [4, 12])],
    "slice.Tensor": [lambda: (wide(), 3, 1, 5), lambda: (wide(), 0, 0, 2**62)],
    "softmax.int": [lambda: (wide(), -1), lambda: (wide(), -1, torch.float64)],
    "split.Tensor": [lambda: (wide(), 3, -1)],
    "transpose.int": [lambda: (wide(), 0, 1)],
    "tril.default": [lambda: (wide(),), lambda: (flat().t(), 1)],
    "unsqueeze.default": [lambda: (wide(), 0), lambda: (wide(), -1)],
    "view.default": [lambda: (wide(), [6, 4, 2, 4]), lambda: (flat().t(), [2, 4, 6])],
}  # fmt: skip


@pytest.mark.parametrize("op", sorted(FOLLOWING))
def test_meta_kernels_say_what_fake_results_look_like(op: str, mode: FakeTensorMode) -> None:
    func: Any = resolve_op(op)
    for given in CALLS[op.removeprefix("aten.")]:
        args = given()
        forms = forms_of(mode)
        bare = forms_of(mode, bare=partial(run_bare, mode))
        wanted, found = forms.run(func, args, {}), bare.run(func, args, {})
        assert len(bare._known) == 1, "it was not asked"
        pairs = zip(listed(wanted), listed(found), strict=True)
        assert all(looks(a) == looks(b) for a, b in pairs)
        assert [shares(a, args) for a in listed(wanted)] == [shares(b, args) for b in listed(found)]


def listed(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


def shares(x: Tensor, args: Any) -> bool:
    """Whether a result is in the memory of the first argument."""
    first = args[0][0] if isinstance(args[0], list) else args[0]
    return bool(x.untyped_storage()._cdata == first.untyped_storage()._cdata)


def test_what_is_wrong_torch_says(mode: FakeTensorMode) -> None:
    bare = forms_of(mode, bare=partial(run_bare, mode))
    with pytest.raises(RuntimeError):
        bare.run(aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3)), {})


def test_draws_of_other_keys_are_alike(mode: FakeTensorMode) -> None:
    func = Counted(torch.ops.merakc.dropout.default)
    forms, x = forms_of(mode), torch.ones(2, 3)
    scalars = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    one, other = (
        forms.run(func, (x, *scalars, 0.1, key, 0, (1, 6), (0, 0), (1, 6)), {}) for key in (1, 2)
    )
    assert func.times == 1
    assert looks(one) == looks(other)
    assert not shares(other, (one,))


def test_a_call_that_returns_its_argument_does_so_again(mode: FakeTensorMode) -> None:
    func = Counted(aten.to.dtype)
    forms = forms_of(mode)
    for _ in range(2):
        x = torch.ones(2, 3)
        assert forms.run(func, (x, torch.float32), {}) is x
        assert forms.run(func, (x, torch.float64), {}) is not x
    assert func.times == 2

"""Results by the forms of arguments: those that torch gives, told apart where they differ."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from merakc.frontend.forms import Forms, is_plain_fake, make_fake, make_meta

aten = torch.ops.aten


class Counted:
    """An op that counts its calls."""

    def __init__(self, func: Any) -> None:
        self.func, self.times = func, 0
        self._schema = func._schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return self.func(*args, **kwargs)


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(allow_non_fake_inputs=True) as found:
        yield found


def forms_of(mode: FakeTensorMode) -> Forms:
    return Forms(partial(make_fake, mode), is_plain_fake, views=True)


def looks(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad


FRESH = {
    "a product": (aten.mm.default, lambda: (torch.ones(2, 3), torch.ones(4, 3).t()), {}),
    "numbers": (aten.add.Tensor, lambda: (torch.ones(2, 3), 1.5), {"alpha": 2}),
    "kept strides": (aten.relu.default, lambda: (torch.ones(4, 3).t(),), {}),
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


def test_a_made_tensor_is_fake() -> None:
    found = make_fake(FakeTensorMode(), ((2, 3), (1, 2), 0, torch.float64))
    assert isinstance(found, FakeTensor)
    assert found.device.type == "cpu"
    assert (found.stride(), found.dtype) == ((1, 2), torch.float64)

"""What holds while a forward is recorded, and that it is undone after, errors included."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from merakc.errors import RecordError
from merakc.frontend.contexts import (
    exporting,
    module_names,
    put_fakes,
    recordable,
    untouched,
)
from merakc.frontend.record import record
from tests.frontend.against_eager import check
from tests.frontend.small import Small, as_installed, linear, randn


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.number = 1
        self.things: list[int] = [1, 2]
        self.table: dict[str, int] = {"a": 1}
        self.names = {"x"}
        self.ordered = OrderedDict(a=1)


def test_what_modules_hold_is_put_back() -> None:
    model = Holds()
    weight, steps = model.layer.weight, model.steps

    def change() -> None:
        model.number = 2
        model.late = torch.ones(1)
        model.things.append(3)
        model.table["b"] = 2
        model.names.clear()
        model.ordered["b"] = 2
        model.layer.weight = nn.Parameter(torch.ones(3))
        model.steps = torch.ones(())
        model.register_buffer("another", torch.ones(1))
        del model.layer.bias
        raise KeyError

    with pytest.raises(KeyError), untouched(model):
        change()
    assert model.number == 1
    assert not hasattr(model, "late")
    assert (model.things, model.table, model.names) == ([1, 2], {"a": 1}, {"x"})
    assert list(model.ordered) == ["a"]
    assert model.layer.weight is weight
    assert model.layer.bias is not None
    assert model.steps is steps
    assert set(dict(model.named_buffers())) == {"steps"}


def test_fakes_keep_ties_strides_and_frozen_parameters() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    table = torch.ones(2, 3).t()
    model = Small(lambda s: None, first=first, second=second, table=table)
    with untouched(model):
        slots = put_fakes(model, FakeTensorMode())
        names = {s.name: s for s in slots}
        assert set(names) == {"table", "first.weight", "first.bias"}
        assert all(isinstance(s.fake, FakeTensor) for s in slots)
        assert model.second.weight is model.first.weight is names["first.weight"].fake
        assert isinstance(model.first.weight, nn.Parameter)
        assert not names["first.bias"].fake.requires_grad
        assert names["table"].fake.stride() == (1, 3)
        assert not names["table"].is_parameter
    assert model.second.weight is first.weight
    assert not isinstance(first.weight, FakeTensor)
    assert model.table is table


def test_the_module_that_runs_is_on_top() -> None:
    names: list[str] = []
    seen: list[list[str]] = []

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(list(names))
            if x.numel() == 0:
                raise KeyError
            return x

    model = Small(lambda s, x: s.inner(x), inner=nn.Sequential(Inner()))
    with module_names(model, names):
        model(torch.ones(1))
        with pytest.raises(KeyError):
            model(torch.ones(0))
        assert names == []
    model(torch.ones(1))
    assert seen == [["", "inner", "inner.0"]] * 2 + [[]]
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_modules_that_a_forward_makes_are_found() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Softmax(0)(x).sum()

    names: list[str] = []
    found: list[str] = []
    model = Small(lambda s, x: s.inner(x), inner=Small(lambda s, x: Sums()(x)))
    with module_names(model, names, found=lambda name, module: found.append(name)):
        model(torch.ones(1))
        assert names == []
    assert found == ["inner.Sums", "inner.Sums.Softmax"]
    model(torch.ones(1))
    assert len(found) == 2


def test_the_compilers_flags_are_raised_for_libraries_alone() -> None:
    def library_fails() -> None:
        assert torch.compiler.is_compiling()
        assert torch.compiler.is_exporting()
        raise KeyError

    with pytest.raises(KeyError), exporting():
        as_installed(library_fails)()
    with exporting():
        assert not torch.compiler.is_compiling()
        assert not torch.compiler.is_exporting()
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()


def test_checks_of_values_pass_and_lstms_are_taken_apart() -> None:
    false = torch.tensor([True, False])

    def check_and_fail() -> None:
        torch._check_tensor_all(false, lambda: "not all")
        assert not torch._C._get_mkldnn_enabled()
        raise KeyError

    enabled = torch._C._get_mkldnn_enabled()
    with pytest.raises(KeyError), recordable(print):
        check_and_fail()
    assert torch._C._get_mkldnn_enabled() == enabled
    with pytest.raises(RuntimeError, match="not all"):
        torch._check_tensor_all(false, lambda: "not all")


def test_starts_and_returns_are_told() -> None:
    names: list[str] = []
    seen: list[str] = []
    model = Small(lambda s, x: s.b(s.a(x)), a=nn.Identity(), b=nn.Identity())
    with module_names(model, names, lambda: seen.append(names[-1])):
        model(torch.ones(1))
    assert seen == ["", "a", "", "b", ""]


def test_a_module_may_be_cast_to_what_it_is() -> None:
    cast = Small(lambda s, x: s.layer.to(torch.float64).cpu()(x).pow(2).sum(), layer=linear())
    check(cast, randn(4, 6))
    before = nn.Module._apply
    wrong = Small(lambda s, x: s.layer.to(torch.float32)(x.float()).sum(), layer=linear())
    with pytest.raises(RecordError, match=r"test_contexts.py:\d+: a forward that casts its own "
                       "Linear, of which 'weight' is torch.float64"):  # fmt: skip
        record(wrong, (randn(4, 6),), {})
    assert nn.Module._apply is before
    assert wrong.layer.weight.dtype == torch.float64


def test_what_fails_on_fake_tensors_is_an_error_and_no_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Small(lambda s, x: torch.matmul(s.layer(x), torch.ones(5, 5)).sum(), layer=linear())
    with pytest.raises(RecordError, match="must have same reduction dim"):
        record(model, (randn(4, 6),), {})
    assert not caplog.records
    assert not capfd.readouterr().err

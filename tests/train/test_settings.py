"""What users change between steps is seen, wherever a forward can see it."""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import merakc
from merakc.errors import MerakWarning
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.settings import Settings, marks
from tests.train import other_settings, settings_module

WEIGHTS = [1.0]
Change = Callable[[Any], Any]


class Base:
    """A class whose attribute objects of another have."""

    factor = 1.0


class Derived(Base):
    """It is looked up here."""

    def __call__(self, z: Tensor) -> Tensor:
        """A method that reads a global, too."""
        return z * self.factor * OPTIONS.factor


OPTIONS = SimpleNamespace(factor=1.0)
PARTLY = partial(torch.mul, other=1.0)
DERIVED = Derived()


def by_default(z: Tensor, factor: float = 1.0) -> Tensor:
    """It is multiplied by its default."""
    return z * factor


def everywhere(z: Tensor) -> Tensor:
    """What a forward may read beside its model."""
    from tests.train import settings_module as late

    z = DERIVED(by_default(PARTLY(z))) * other_settings.FACTOR * late.FACTOR
    z = z * (other_settings.TABLE["factor"] if z.dim() else other_settings.factor_of(z))
    z = z * getattr(other_settings, "LATER", 1.0) * globals().get("LATEST", 1.0)
    return z * float(os.environ.get("FACTOR", "1"))


OUTSIDE: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "an attribute of a base class": lambda m: m.setattr(Base, "factor", 2.0),
    "a method": lambda m: m.setattr(Derived, "__call__", lambda self, z: z * 2),
    "options": lambda m: m.setattr(OPTIONS, "factor", 2.0),
    "a partial's keyword": lambda m: m.setitem(PARTLY.keywords, "other", 2.0),
    "a default": lambda m: m.setattr(by_default, "__defaults__", (2.0,)),
    "the code of a function": lambda m: m.setattr(by_default, "__code__", twice.__code__),
    "another function": lambda m: m.setitem(globals(), "by_default", scaled(2)),
    "a module's variable": lambda m: m.setattr(other_settings, "FACTOR", 2.0),
    "a module's mapping": lambda m: m.setitem(other_settings.TABLE, "factor", 2.0),
    "that of one that is imported late": lambda m: m.setattr(settings_module, "FACTOR", 2.0),
    "one that was not there": lambda m: m.setattr(other_settings, "LATER", 2.0, raising=False),
    "a global that was not there": lambda m: m.setitem(globals(), "LATEST", 2.0),
    "the environment": lambda m: m.setenv("FACTOR", "2"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_a_forward_reads_beside_its_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Free()
    model.act = lambda z: everywhere(z)
    settings, x = Settings(model), torch.ones(2, 4)
    before = model(x).item()
    assert settings.changed() == ()
    OUTSIDE[name](monkeypatch)
    assert model(x).item() == pytest.approx(4 * before)
    assert settings.changed() != ()
    monkeypatch.undo()
    assert model(x).item() == before
    assert settings.changed() == ()


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda z: z * factor


def twice(z: Tensor, factor: float = 1.0) -> Tensor:
    return 2 * z * factor


class Free(nn.Module):
    """A loss with factors in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table: dict[str, Any] = {"a": {"w": 1.0}}
        self.list, self.array, self._own = [1.0], np.ones(1), 1.0
        self.inner = SimpleNamespace(inner=SimpleNamespace(w=1.0))
        self.constant = torch.ones((), dtype=torch.float64)
        self.act: Any = nn.functional.gelu
        self.more: list[Any] = []
        self.counter = Counter[str]()
        self.scale = self.by_one

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        z = self.act(self.layer(x)) * self.table["a"]["w"] * self.list[0] * float(self.array[0])
        z = z * self._own * self.inner.inner.w * self.constant * WEIGHTS[0]
        for f in self.more:
            z = f(z)
        z = z.square().mean() * getattr(self, "late", 1.0) * (1 + self.counter["w"])
        return self.scale(z)

    def by_one(self, z: Tensor) -> Tensor:
        """The same."""
        return z


CHANGES: dict[str, Change] = {
    "a mapping in a mapping": lambda m: m.table["a"].update(w=2.0),
    "a list": lambda m: m.list.__setitem__(0, 2.0),
    "an array": lambda m: m.array.fill(2.0),
    "an underscore": lambda m: setattr(m, "_own", 2.0),
    "an object in an object": lambda m: setattr(m.inner.inner, "w", 2.0),
    "a tensor, replaced": lambda m: setattr(m, "constant", m.constant * 2),
    "a tensor, written to": lambda m: m.constant.mul_(2),
    "a tensor, unseen": lambda m: m.constant.data.mul_(2),
    "a tensor, by NumPy": lambda m: m.constant.numpy().__imul__(2),
    "a counter": lambda m: m.counter.update("w"),
    "a function": lambda m: setattr(m, "act", scaled(2)),
    "one more": lambda m: m.more.append(scaled(2)),
    "a new attribute": lambda m: setattr(m, "late", 2.0),
    "a global": lambda _: WEIGHTS.__setitem__(0, 2.0),
    "another method": lambda m: setattr(m, "scale", MethodType(lambda _, z: z * 2, m)),
    "a hook": lambda m: m.layer.register_forward_hook(lambda _m, _a, out: out * 2),
}


@pytest.mark.filterwarnings("ignore:merakc has compiled this model for 8")
def test_each_change_is_computed_with() -> None:
    """One after the other, in one model."""
    x = torch.linspace(-1, 1, 32).double().view(8, 4)
    torch.manual_seed(0)
    plain = Free().double()
    source = copy.deepcopy(plain)
    model = merakc.auto_parallel(source, x, micro_batches=4, cluster=NOMINAL_CPU)
    try:
        for name, change in CHANGES.items():
            change(plain)
            if name != "a global":
                change(source)
            assert model(x).item() == pytest.approx(plain(x).item(), rel=1e-12), name
        compiled = len(model._own("_steps").compiled)
        model(x)
        assert len(model._own("_steps").compiled) == compiled == len(CHANGES) + 1
    finally:
        WEIGHTS[0] = 1.0


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_comes_back(name: str) -> None:
    """Equal settings have equal keys, and what steps do themselves is none of the user's."""
    model = Free()
    settings = Settings(model)
    assert settings.changed() == ()
    try:
        CHANGES[name](model)
        key = settings.changed()
        assert key
        assert settings.now() == settings.seen == (settings.modes(), key)
        model.table["a"]["v"] = 3
        assert settings.changed() not in ((), key)
        del model.table["a"]["v"]
        assert settings.changed() == key
        settings.settle()
        model.late = 5.0
        settings.settle()
        assert settings.changed() == key
    finally:
        WEIGHTS[0] = 1.0


def test_modes_are_told_apart_by_themselves() -> None:
    model = Free()
    settings = Settings(model)
    model.eval()
    assert settings.changed() == ()
    assert settings.modes() == (False, False)


def test_what_each_step_writes_is_told_once() -> None:
    """Of recurrent modules each step lists the weights anew: every step of a loss in the loop was
    compiled again for it.
    """
    torch.manual_seed(0)
    model = nn.GRU(4, 4, batch_first=True)
    data = [torch.randn(2, 3, 4) for _ in range(5)]
    with pytest.warns(MerakWarning, match="returns no loss"):
        parallel = merakc.auto_parallel(copy.deepcopy(model), data[0], cluster=NOMINAL_CPU)
    counts = []
    for x in data:
        found, wanted = (m(x)[0].square().mean() for m in (parallel, model))
        assert torch.allclose(found, wanted)
        found.backward()
        counts.append(len(parallel._own("_steps").compiled))
    assert counts[1:] == counts[1:2] * 4


FORMS: dict[str, Change] = {
    "the order of a mapping": lambda m: m.table.update(a=m.table.pop("a")),
    "the order of an ordered one": lambda m: m.ordered.move_to_end("a"),
    "the form of an array": lambda m: setattr(m.array, "shape", (2, 1)),
    "a number of C": lambda m: setattr(m.number, "value", 2.0),
    "one that processes share": lambda m: setattr(m.shared, "value", 2.0),
    "bytes of another": lambda m: m.view.__setitem__(0, 2),
    "the sign of a zero": lambda m: setattr(m, "zero", -0.0),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_and_orders_are_seen(name: str) -> None:
    model = Free()
    model.table = {"a": 1.0, "b": 2.0}
    model.ordered = OrderedDict(a=1.0, b=2.0)  # type: ignore[assignment]
    model.array, model.zero = np.ones((1, 2)), 0.0  # type: ignore[assignment]
    model.number, model.shared = ctypes.c_double(1.0), multiprocessing.Value("d", 1.0)  # type: ignore[assignment]
    model.view = memoryview(bytearray(b"\x01"))  # type: ignore[assignment]
    settings = Settings(model)
    assert settings.changed() == ()
    FORMS[name](model)
    assert settings.changed() != ()


@pytest.mark.filterwarnings("ignore")  # torch's, of nested and quantized tensors
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: TwoTensor(x.clone(), x),
        lambda x: torch.nested.as_nested_tensor([x, x[:2]]),
        lambda x: torch.nested.as_nested_tensor([x, x[:2]], layout=torch.jagged),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
    ],
    ids=["plain", "of two", "nested", "jagged", "quantized", "conjugated", "negated"],
)
def test_marks_of_tensors_of_every_kind(make: Callable[[Tensor], Tensor]) -> None:
    one, same = (marks(make(torch.ones(3))) for _ in range(2))
    assert one == same != marks(make(torch.full((3,), 2.0)))


def test_tensors_without_elements_have_marks() -> None:
    with FakeTensorMode():
        fake, real = marks(torch.ones(3)), marks(torch.nn.Parameter(torch.ones(3)))
    assert fake[1] == 0 == marks(torch.ones(3, device="meta"))[1]
    assert real[2]

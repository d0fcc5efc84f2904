"""What a forward asks of autograd: eager's answers, or a refusal with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from merakc.errors import RecordError
from merakc.frontend.record import record
from tests.frontend.against_eager import check
from tests.frontend.small import Small, here, linear, randn


class Asks(nn.Module):
    """A forward that branches on what `question` says of a value behind one layer."""

    def __init__(self, question: Callable[[Any, Tensor, Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.frozen, self.question = linear(), linear().requires_grad_(False), question

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.square().sum() * (3.0 if self.question(self, x, y) else 5.0)


@torch.no_grad()
def without(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    return out


def written(y: Tensor) -> Tensor:
    table = torch.zeros(4, 6, dtype=torch.float64)
    view = table[:2]
    table[1:] = y[1:]
    return view


QUESTIONS: dict[str, Callable[[Any, Tensor, Tensor], bool]] = {
    "a value": lambda s, x, y: y.requires_grad,
    "the batch": lambda s, x, y: x.requires_grad,
    "a parameter": lambda s, x, y: s.layer.weight.requires_grad,
    "a frozen parameter": lambda s, x, y: s.frozen.weight.requires_grad,
    "behind a frozen layer": lambda s, x, y: s.frozen(x).requires_grad,
    "detached": lambda s, x, y: y.detach().requires_grad,
    "data": lambda s, x, y: y.data.requires_grad,
    "detached in place": lambda s, x, y: (y * 1).detach_().requires_grad,
    "without gradients": lambda s, x, y: without(s.layer, x).requires_grad,
    "integers": lambda s, x, y: y.argmax(-1).requires_grad,
    "a view of what was written": lambda s, x, y: written(y).requires_grad,
    "a view of a parameter": lambda s, x, y: s.layer.weight[0].requires_grad,
    "grad_fn": lambda s, x, y: y.grad_fn is not None,
    "grad_fn of a parameter": lambda s, x, y: s.layer.weight.grad_fn is not None,
    "grad_fn of the batch": lambda s, x, y: (x * 2).grad_fn is not None,
    "leaf": lambda s, x, y: y.is_leaf,
    "leaf, a parameter": lambda s, x, y: s.layer.weight.is_leaf,
    "leaf, the batch": lambda s, x, y: (x * 2).is_leaf,
    "gradients on": lambda s, x, y: torch.is_grad_enabled(),
    "grad": lambda s, x, y: x.grad is None,
    "made a leaf": lambda s, x, y: y.detach().requires_grad_().requires_grad,
    "made a leaf, by assignment": lambda s, x, y: made_a_leaf(y).is_leaf,
    "after a leaf": lambda s, x, y: (x.detach().requires_grad_() * 2).requires_grad,
    "beside a leaf": lambda s, x, y: [x.detach().requires_grad_(), x.requires_grad][1],
    "marked without a derivative": lambda s, x, y: Half.apply(y)[1].requires_grad,
    "marked, the other": lambda s, x, y: Half.apply(y)[0].requires_grad,
    "switched as it is": lambda s, x, y: switched(s).requires_grad,
}


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        second = x * 3
        ctx.mark_non_differentiable(second)
        return x * 2, second

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def made_a_leaf(y: Tensor) -> Tensor:
    z = y.detach() * 2
    z.requires_grad = True
    return z


def switched(s: Any) -> Tensor:
    s.layer.requires_grad_(True)
    s.frozen.requires_grad_(False)
    weight: Tensor = s.frozen.weight
    return weight


@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_are_those_of_eager(name: str) -> None:
    check(Asks(QUESTIONS[name]), randn(4, 6))


def gradients_off(s: Any, x: Tensor) -> Any:
    y = s.layer(x)
    with torch.no_grad():
        a = s.layer(x) * 2
    with torch.set_grad_enabled(False), torch.enable_grad():
        b = s.layer(x) * 3
    with torch.inference_mode():
        c = s.layer(x) * 4
    return (y * a * b + y * c.clone()).sum()


def test_regions_without_gradients() -> None:
    check(Small(gradients_off, layer=linear()), randn(4, 6))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_checkpoints(reentrant: bool, frozen: bool) -> None:
    """With a frozen first layer, as adapters have, whose output is made to require a gradient."""

    def forward(s: Any, x: Tensor) -> Any:
        y = s.first(x)
        if frozen:
            y.requires_grad_()
        return checkpoint(s.layer, y, use_reentrant=reentrant).square().sum()

    first = linear().requires_grad_(not frozen)
    check(Small(forward, first=first, layer=linear()), randn(4, 6))


def test_hooks_of_torch_on_what_is_saved() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        with save_on_cpu():
            return s.layer(x).square().sum()

    check(Small(forward, layer=linear()), randn(4, 6))


FUNCTIONAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad": lambda s, x: torch.func.grad(lambda z: s.layer(z).tanh().sum())(x),
    "vjp": lambda s, x: torch.func.vjp(lambda z: s.layer(z).tanh(), x)[1](x)[0],
    "jvp": lambda s, x: torch.func.jvp(lambda z: s.layer(z).tanh(), (x,), (x * 2,))[1],
    "jacrev": lambda s, x: torch.func.jacrev(lambda z: s.layer(z).tanh().sum(0))(x),
    "hessian": lambda s, x: torch.func.hessian(lambda z: s.layer(z).tanh().sum())(x[0]),
    "per sample": lambda s, x: torch.vmap(torch.func.grad(lambda z: s.layer(z).tanh().sum()))(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, when it first needs a tangent
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_derivatives_by_torch_func(name: str) -> None:
    model = Small(lambda s, x: FUNCTIONAL[name](s, x).square().sum(), layer=linear())
    check(model, randn(4, 6), relative=1e-13)


def hook(grad: Tensor) -> Tensor:
    return grad * 2


def halved(s: Any, x: Tensor, y: Tensor) -> Any:
    with saved_tensors_hooks(lambda t: t.half(), lambda t: t.double()):
        return y.square()


REFUSED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], str]] = {
    "a hook": (lambda s, x, y: y.register_hook(hook), "register_hook is called on a tensor in"),
    "a hook where it can be": (
        lambda s, x, y: y.register_hook(hook) if y.requires_grad else y, "register_hook"),
    "a hook on a parameter": (
        lambda s, x, y: s.layer.weight.register_hook(hook), "'layer.weight'"),
    "a hook on an accumulation": (
        lambda s, x, y: s.layer.weight.register_post_accumulate_grad_hook(hook), "auto_parallel"),
    "a kept gradient": (lambda s, x, y: y.retain_grad(), "retain_grad"),
    "a hook on a node": (lambda s, x, y: y.grad_fn.register_hook(hook), "grad_fn.register_hook"),
    "a gradient": (
        lambda s, x, y: torch.autograd.grad(y.sum(), s.layer.weight, create_graph=True),
        "torch.autograd.grad or backward"),
    "a gradient of the batch": (
        lambda s, x, y: torch.autograd.grad(s.layer(x.requires_grad_()).sum(), x), "the batch is"),
    "a backward": (lambda s, x, y: y.sum().backward(), "torch.autograd.grad or backward"),
    "a tangent": (lambda s, x, y: forward_ad.dual_level().__enter__(), "forward-mode"),
    "frozen": (lambda s, x, y: s.layer.requires_grad_(False), "switched off in the forward"),
    "thawed": (
        lambda s, x, y: setattr(s.frozen.weight, "requires_grad", True), "'frozen.weight'"),
    "a gradient that is read": (lambda s, x, y: s.layer.weight.grad, "gradient of 'layer.weight'"),
    "a gradient that is put": (lambda s, x, y: setattr(y, "grad", x), "gradient of a tensor is re"),
    "data that is put": (
        lambda s, x, y: setattr(s.layer.weight, "data", x[:, :6]), "the data of a tensor, 'layer"),
    "saved in fewer bits": (halved, "saved_tensors_hooks"),
    "left off": (lambda s, x, y: torch.set_grad_enabled(False), "leaves gradients switched off"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_line(name: str) -> None:
    act, message = REFUSED[name]

    def forward(s: Any, x: Tensor) -> Any:
        y = s.layer(x)
        act(s, x, y)
        return y.sum()

    model = Small(forward, layer=linear(), frozen=linear().requires_grad_(False))
    before = {k: v for k, v in vars(FakeTensor).items() if not k.startswith("__")}
    with pytest.raises(RecordError, match=message) as caught:
        record(model, (randn(6, 6),), {})
    if name != "left off":
        assert "test_history.py:" in str(caught.value)
    assert {k: v for k, v in vars(FakeTensor).items() if not k.startswith("__")} == before
    assert torch.is_grad_enabled()


def test_a_trained_tensor_that_is_no_parameter() -> None:
    outside = randn(6).requires_grad_()
    forward: Callable[..., Any] = lambda s, x: (s.layer(x) * outside).sum()  # noqa: E731
    with pytest.raises(RecordError, match=r"shape \(6,\) that requires a gradient is no") as caught:
        record(Small(forward, layer=linear()), (randn(4, 6),), {})
    assert str(caught.value).startswith(here(forward, 0))

"""What a forward asks of autograd while it is recorded: true answers, or a refusal with its line.

The recorder runs below autograd, where no tensor has a history. Which values require a gradient it
knows all the same, and what it cannot say it refuses: nobody is answered as if there were nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from merakc.errors import RecordError
from merakc.frontend.builder import GraphBuilder
from merakc.frontend.replaced import replaced
from merakc.frontend.source import is_users, user_line

_autograd: Any = torch._C._autograd
_PUSH = "_push_saved_tensors_default_hooks"  # which every way to have such hooks calls
_NO_HISTORY = "a recorded graph is differentiated later, and as a whole"
# Methods of tensors that act on a history, and what to do in their place.
_ACTS = {
    "register_hook": "write an autograd.Function whose backward does what the hook does",
    "register_post_accumulate_grad_hook": "register it on the parameter of the model that "
    "auto_parallel returns",
    "retain_grad": "write an autograd.Function whose backward sees the gradient",
}
# What differentiates: where torch's Python looks it up, by name, and what users call it.
_DIFFERENTIATES: tuple[tuple[Any, str, str], ...] = (
    (torch.autograd, "_engine_run_backward", "torch.autograd.grad or backward()"),
    (forward_ad, "enter_dual_level", "forward-mode differentiation"),
)


class _Node:
    """Stands for a tensor's `grad_fn`: that there is one is all that it says."""

    def __init__(self, refuse: Callable[[str], RecordError]) -> None:
        self._refuse = refuse

    def __getattr__(self, name: str) -> Any:
        raise self._refuse(f"grad_fn.{name}")


class HistoryRecorder(GraphBuilder):
    """The part of the recorder that answers for autograd; not while it is `paused`."""

    paused: bool

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Answers what fake tensors are asked, and refuses calls that would go unheard."""
        with contextlib.ExitStack() as stack:
            for name, value in self._attributes().items():
                stack.enter_context(replaced(FakeTensor, name, value))
            for place, name, called in _DIFFERENTIATES:
                refuse = self._refusing(getattr(place, name), called)
                stack.enter_context(replaced(place, name, refuse))
            stack.enter_context(replaced(_autograd, _PUSH, self._saved_hooks()))
            enabled = torch.is_grad_enabled()
            yield
            if torch.is_grad_enabled() != enabled:
                torch.set_grad_enabled(enabled)
                raise RecordError(
                    f"the forward leaves gradients switched {'off' if enabled else 'on'} for "
                    "what runs after it; use `with torch.set_grad_enabled(...)`"
                )

    def _attributes(self) -> dict[str, Any]:
        """The attributes of fake tensors that are about autograd."""
        plain: Any = torch.Tensor.data

        def switch(x: FakeTensor, wanted: bool = True) -> FakeTensor:
            self._require_grad(x, wanted)
            return x

        def put(what: str) -> Callable[[FakeTensor, Any], None]:
            def setter(x: FakeTensor, _: Any) -> None:
                raise self._refused(f"{what} of a tensor{self._owner(x)} is replaced")

            return setter

        def acting(name: str) -> Callable[..., Any]:
            def act(x: FakeTensor, *_: Any, **__: Any) -> Any:
                if not self._requires_grad(x):
                    return getattr(torch.Tensor, name)(x, *_, **__)  # which says so
                raise self._refused(f"{name} is called on a tensor{self._owner(x)}", _ACTS[name])

            return act

        return {
            "requires_grad": property(self._told_of_grad, self._require_grad),
            "requires_grad_": switch,
            "is_leaf": property(self._is_leaf),
            "grad_fn": property(self._grad_fn),
            "grad": property(self._grad, put("the gradient")),
            "_version": property(self._version),
            "data": property(plain.__get__, put("the data")),
            **{name: acting(name) for name in _ACTS},
        }

    def _version(self, x: FakeTensor) -> int:
        if is_users(sys._getframe(2).f_code) and not self.paused:
            raise self._error(
                f"the _version of a tensor{self._owner(x)} is read in the forward, and a recording "
                "has other tensors",
                "count changes in an attribute, or in a buffer",
            )
        return int(torch.Tensor._version.__get__(x))  # type: ignore[attr-defined]

    def _refused(self, what: str, remedy: str = "") -> RecordError:
        return self._error(f"{what} in the forward, and {_NO_HISTORY}", remedy or "move it out")

    def _refusing(self, original: Callable[..., Any], called: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if self.paused or _has_history(args):
                return original(*args, **kwargs)
            what = f"{called} is called in the forward, and {_NO_HISTORY}"
            raise self._untraceable(what, "take the derivative by torch.func.grad")

        return refuse

    def _saved_hooks(self) -> Callable[..., Any]:
        """Lets torch's own hooks on saved tensors pass, which give back what they were given."""
        original = getattr(_autograd, _PUSH)

        def enter(pack: Any, unpack: Any) -> None:
            module = getattr(pack, "__module__", None) or ""
            own = module.startswith("torch.")
            self.checkpoints |= module == "torch.utils.checkpoint" and not self.paused
            if not (own or self.paused):
                raise self._refused("saved_tensors_hooks is entered", "write an autograd.Function")
            original(pack, unpack)

        return enter

    def _told_of_grad(self, x: FakeTensor) -> bool:
        """Whether a value of the graph requires a gradient, where the forward asks."""
        found = self._requires_grad(x)
        if found and not self.asks and is_users(sys._getframe(2).f_code):
            self.asks = user_line()
        return found

    def _requires_grad(self, x: FakeTensor) -> bool:
        """Whether a value of the graph requires a gradient."""
        if self.aliases.find(x) is None:
            return bool(torch.Tensor.requires_grad.__get__(x))  # type: ignore[attr-defined]
        return self._ref(x) in self.grads

    def _require_grad(self, x: FakeTensor, wanted: bool) -> None:
        """Makes a value a leaf of its own. No parameter's gradient depends on that."""
        alias = self.aliases.find(x)
        if alias is None:
            torch.Tensor.requires_grad.__set__(x, wanted)  # type: ignore[attr-defined]
        elif wanted != self._requires_grad(x):
            if any(x is given for given in self.batch.values()):
                raise self._error(
                    "requires_grad of a tensor of the batch is switched on in the forward, which "
                    "no step leaves so",
                    "write x = x.detach().requires_grad_()",
                )
            if alias.storage.is_parameter or not wanted:
                raise self._error(
                    f"requires_grad of a tensor{self._owner(x)} is switched "
                    f"{'on' if wanted else 'off'} in the forward",
                    "set it before auto_parallel, or use detach()",
                )
            if not (x.is_floating_point() or x.is_complex()):
                raise self._error(f"requires_grad of a {x.dtype} tensor", "make it floating")
            ref = self._emit("aten.detach.default", (self._ref(x),), {}, (x,))
            self.aliases.add_view(x, ref, alias, "aten.detach.default", ())
            self.grads.add(ref)
            self.leaves.add(ref)

    def _is_leaf(self, x: FakeTensor) -> bool:
        alias = self.aliases.find(x)
        if alias is None or not self._requires_grad(x):
            return True
        return self._ref(x) in self.leaves or bool(alias.storage.target and alias.parent is None)

    def _grad_fn(self, x: FakeTensor) -> _Node | None:
        return None if self._is_leaf(x) else _Node(self._refused)

    def _grad(self, x: FakeTensor) -> None:
        """The gradient of a tensor: of values in a forward there is none yet."""
        alias = self.aliases.find(x)
        if alias is not None and alias.storage.is_parameter and alias.parent is None:
            raise self._refused(f"the gradient of '{alias.storage.target}' is read")


def _has_history(args: tuple[Any, ...]) -> bool:
    """Whether what is differentiated is of a transform of torch.func, whose calls are nodes."""
    if torch._C._are_functorch_transforms_active():
        return True
    history: Any = torch.Tensor.grad_fn
    outputs = args[0] if args else ()
    return any(isinstance(x, torch.Tensor) and history.__get__(x) is not None for x in outputs)


@contextlib.contextmanager
def unasked() -> Iterator[None]:
    """Raises `AskedError` where code of the user's asks for gradients: of a module that runs as it
    is, the forward runs without any.
    """
    plain: Any = torch.Tensor.requires_grad
    enabled = torch.is_grad_enabled

    def requires_grad(x: torch.Tensor) -> bool:
        _check_asking("whether a tensor requires a gradient")
        return bool(plain.__get__(x))

    def is_grad_enabled() -> bool:
        _check_asking("whether gradients are on")
        return enabled()

    answers = property(requires_grad, plain.__set__)
    with (
        replaced(torch.Tensor, "requires_grad", answers),
        replaced(torch, "is_grad_enabled", is_grad_enabled),
    ):
        yield


class AskedError(RecordError):
    """A question about gradients that has no true answer."""


def _check_asking(what: str) -> None:
    if is_users(sys._getframe(3).f_code):  # behind the question, and what chooses by thread
        raise AskedError(f"it asks {what}, at {user_line()}")

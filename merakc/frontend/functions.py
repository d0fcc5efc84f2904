"""Custom `autograd.Function`s while a forward is recorded: each call is one node with its backward.

Calls are seen where torch's own `apply` goes down to C++, which every way to call it passes:
`MyFunction.apply`, an `apply` that was bound before the recording, one that a class overrides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode

from merakc.errors import RecordError
from merakc.frontend.builder import GraphBuilder
from merakc.frontend.calls.writes import written
from merakc.frontend.python.content import describe
from merakc.frontend.replaced import in_this_thread, replaced
from merakc.frontend.source import user_line
from merakc.ir.graph import Ref

# The class through which every `apply` of Python's goes on to C++'s.
_BASE: Any = torch.autograd.function._SingleLevelFunction
_APPLY = torch._C._FunctionBase.__dict__["apply"]


def apply_plainly(cls: type[Any], *args: Any) -> Any:
    """Torch's own `apply` of a custom function."""
    return _APPLY.__get__(None, cls)(*args)


@contextlib.contextmanager
def function_calls(handle: Callable[..., Any]) -> Iterator[None]:
    """Calls `handle(cls, args)` in place of a custom function's `apply`, bound early or not."""
    handled = in_this_thread(lambda cls, *args: handle(cls, args), apply_plainly)
    _BASE.apply = classmethod(handled)
    try:
        yield
    finally:
        del _BASE.apply


@dataclass(frozen=True)
class Apply:
    """Calls a custom function with the leaves of its arguments, as `structure` holds them; with
    copies of those at the places that it has `written` to.
    """

    cls: type[Any]
    structure: pytree.TreeSpec
    written: tuple[int, ...] = ()

    def __call__(self, *leaves: Any) -> Any:
        """What the function returns."""
        own = [x.clone() if k in self.written else x for k, x in enumerate(leaves)]
        args = pytree.tree_unflatten(own, self.structure)
        out = apply_plainly(self.cls, *args)
        if (given := _GIVEN.get()) is not None:
            given.append((self.cls.__name__, args, describe(args, id)))
        return out


# Functions called under `unchanged_arguments`: their names, arguments, and what these held.
_GIVEN: ContextVar[list[tuple[str, Any, Any]] | None] = ContextVar("given", default=None)


@contextlib.contextmanager
def unchanged_arguments() -> Iterator[None]:
    """Refuses backwards, run inside, that change what their function was given in Python."""
    given: list[tuple[str, Any, Any]] = []
    token = _GIVEN.set(given)
    try:
        yield
        for name, args, held in given:
            if describe(args, id) != held:
                raise RecordError(
                    f"the backward of custom function {name} changes a list, dict or object that "
                    "its forward was given, which a compiled step does not; return it as a "
                    "tensor, or change it outside of the step"
                )
    finally:
        _GIVEN.reset(token)


@contextlib.contextmanager
def _without_derivative(found: list[torch.Tensor]) -> Iterator[None]:
    """Adds to `found` what functions mark as not differentiable."""
    original = FunctionCtx.mark_non_differentiable

    def mark(ctx: Any, *tensors: torch.Tensor) -> None:
        found.extend(tensors)
        original(ctx, *tensors)

    with replaced(FunctionCtx, "mark_non_differentiable", mark):
        yield


class _Watch(TorchDispatchMode):
    """Which of the tensors that were there before are read and written by the calls inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, torch.Tensor] = {}
        self.read: list[torch.Tensor] = []
        self.written: list[torch.Tensor] = []
        self.draws = False  # whether any of them draws random numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        self.read += self._before((args, kwargs))
        self.written += self._before(written(func, args, kwargs))
        out = func(*args, **kwargs)
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and not any(x is r for r in self.read):
                self.made[id(x)] = x
        return out

    def _before(self, tree: Any) -> list[torch.Tensor]:
        tensors = [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
        return [x for x in tensors if id(x) not in self.made]


class FunctionRecorder(GraphBuilder):
    """The part of the recorder that writes the nodes of custom functions."""

    paused: bool

    def finish(self, out: Any) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
        """Ends the recording; refuses functions whose list or dict the forward changed later."""
        for called, args, held in self.applied:
            if [id(x) for x in pytree.tree_leaves(args)] != held:
                raise RecordError(
                    f"{called} is given a list or dict that the forward changes later, which its "
                    "backward would not see in a compiled step; give it a copy, or tensors alone"
                )
        return super().finish(out)

    def _function(self, cls: Any, args: Any) -> Any:
        """A custom function's call, seen from C++'s `apply`."""
        if self.paused:
            return apply_plainly(cls, *args)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            self.checkpoints = True
            # It needs an input with a gradient; without one, eager gives its parameters none.
            inputs = [a for a in args if isinstance(a, torch.Tensor)]
            with torch.set_grad_enabled(any(self._ref(a) in self.grads for a in inputs)):
                return args[0](*args[2:])
        leaves, structure = pytree.tree_flatten(args)
        given = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not any(self._ref(x) in self.grads for x in given):  # its backward is never asked for
            return apply_plainly(cls, *args)
        self.paused, watch = True, _Watch()
        constant: list[torch.Tensor] = []
        try:
            with watch, _without_derivative(constant):
                out = apply_plainly(cls, *args)
        finally:
            self.paused = False
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        held = [id(x) for x in pytree.tree_leaves(args)]
        self.applied.append((f"{user_line()}: custom function {cls.__name__}", args, held))
        changed = self._check(cls, given, outs, watch)
        written = tuple(k for k, x in enumerate(leaves) if any(x is y for y in changed))
        name = self._function_name(Apply(cls, structure, written))
        ref = self._emit(name, tuple(self._args(x) for x in leaves), {}, outs)
        for index, item in enumerate(outs):
            if any(item is x for x in changed):
                self.aliases.write(self._alias(item), Ref(ref.node, index), self.grads)
            elif isinstance(item, torch.Tensor):
                self.aliases.add(item, Ref(ref.node, index))
            if any(item is x for x in constant):
                self.grads.discard(Ref(ref.node, index))
        return out

    def _check(
        self, cls: Any, given: Sequence[torch.Tensor], outs: Sequence[Any], watch: _Watch
    ) -> list[torch.Tensor]:
        """The arguments that a call has written to. Raises where a node would not be the call."""
        called = f"custom function {cls.__name__}"
        if watch.draws:
            raise self._error(
                f"{called} draws random numbers, which would be others on each layout",
                "draw them outside, by torch.rand and the like, and give them to apply()",
            )
        for x in watch.read:
            if self.aliases.find(x) is not None and not any(x is g for g in given):
                raise self._untraceable(
                    f"{called} reads a tensor that it is not given{self._owner(x)}",
                    "give it to apply() as an argument: autograd looks at those alone",
                )
        inner = [o for o in outs if not isinstance(o, torch.Tensor)]
        if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(inner)):
            raise self._untraceable(
                f"{called} returns tensors inside a container", "return them one by one"
            )
        for x in watch.written:
            if not any(x is o for o in outs):
                raise self._untraceable(
                    f"{called} writes to a tensor that it does not return",
                    "return it, and mark it by ctx.mark_dirty",
                )
        return watch.written

    def _function_name(self, apply: Apply) -> str:
        """The op name of a custom function; classes of one name are numbered."""
        base = name = f"function.{apply.cls.__name__}.{apply.cls.__module__}"
        number = 1
        while self.functions.setdefault(name, apply) != apply:
            number += 1
            name = f"{base}.{number}"
        return name

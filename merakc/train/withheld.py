"""Methods of the modules inside a parallel model: those that look something up run, as
`get_encoder` does; what would compute with a rank's part of weights, or change something, is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import update_wrapper
from inspect import iscoroutinefunction, isgeneratorfunction
from types import FunctionType, MethodType
from typing import Any

from merakc.errors import ConfigError
from merakc.train.parameters.guard import Guard, guard, guarding, unguarded


class Looking(Guard):
    """While such a method runs."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answers what is asked about tensors, and refuses to compute."""
        if not self.asks(func):
            raise _refusal(self.called)
        return super().__torch_function__(func, types, args, kwargs)


class Withheld:
    """A method or property of a user's class, in the class of the parts that stand for its modules.
    A property is not there; a method is, lest code that looks for it passes over it in silence.
    """

    def __init__(self, value: Any = None) -> None:
        self.method = value if isinstance(value, FunctionType) else None
        if self.method is not None:
            update_wrapper(self, self.method)  # with its signature

    def __get__(self, part: Any, _: type | None = None) -> Any:
        if part is None or self.method is None:
            raise AttributeError  # and so the part's `__getattr__` is asked
        return MethodType(self, part)

    def __call__(self, part: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs it. Raises `ConfigError` where it does more than to look."""
        assert self.method is not None
        called = f"{type(part).__name__}.{self.method.__name__}"
        if iscoroutinefunction(self.method) or isgeneratorfunction(self.method):
            raise _refusal(called)  # it would run later
        return _look(part, self.method, called, args, kwargs)


@unguarded
def _look(part: Any, method: Any, called: str, args: Any, kwargs: Any) -> Any:
    with guard(Looking(called)):
        return method(part, *args, **kwargs)


def refuse_to_change(name: str) -> None:
    """Raises `ConfigError` where a method that may but look something up sets or deletes this."""
    if isinstance(looking := guarding(), Looking):
        raise _refusal(f"{looking.called}, which changes '{name}',")


def _refusal(called: str) -> ConfigError:
    return ConfigError(
        f"{called} is called after auto_parallel, and this rank may hold a part of the module's "
        "weights; call it before, or inside the model's forward"
    )

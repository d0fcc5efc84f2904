"""What stands around a forward and changes what its calls do: modes, hooks on what is saved, flags.

None of it can be part of a recorded graph but what holds while it is recorded, and ends with it.
"""

from __future__ import annotations

import contextlib
import decimal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch

from merakc.errors import RecordError
from merakc.frontend.replaced import replaced
from merakc.frontend.source import user_line

_OWN = ("torch.", "merakc.")
_MODE_REMEDY = "a compiled step does not pass it; write what it does into the model"


def decimal_settings() -> dict[str, Any]:
    """What arithmetic of Python's `decimal` goes by in this thread."""
    context = decimal.getcontext()
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    traps = tuple(signal for signal, is_set in context.traps.items() if is_set)
    return {**{name: getattr(context, name) for name in names}, "traps": traps}


def _set_decimal(settings: dict[str, Any]) -> None:
    context = decimal.getcontext()
    traps = {signal: signal in settings["traps"] for signal in context.traps}
    for name, value in {**settings, "traps": traps}.items():
        setattr(context, name, value)


# Switches that a forward may leave otherwise than it found them, and how they are set.
_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, torch.set_default_device),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "the precision of matrix products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the context of decimal": (decimal_settings, _set_decimal),
    "checks of anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
}
for _kind in ("cpu", "cuda"):
    _FLAGS[f"autocast on {_kind}"] = (
        partial(torch.is_autocast_enabled, _kind), partial(torch.set_autocast_enabled, _kind)
    )  # fmt: skip
    _FLAGS[f"the dtype of autocast on {_kind}"] = (
        partial(torch.get_autocast_dtype, _kind), partial(torch.set_autocast_dtype, _kind)
    )  # fmt: skip


def check_around(called: str) -> None:
    """Raises `RecordError` where a mode, or hooks on what is saved, of the user's are entered."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        modes = [
            *_python_dispatch._get_current_dispatch_mode_stack(),
            *_get_current_function_mode_stack(),  # type: ignore[no-untyped-call]
        ]
        for mode in modes:
            if not _is_own(type(mode)):
                raise RecordError(
                    f"{user_line()}: {called} is called in the mode {type(mode).__name__}; "
                    f"{_MODE_REMEDY}"
                )
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and not _is_own(hooks[0]):
        raise RecordError(
            f"{user_line()}: {called} is called with saved_tensors_hooks entered, which a compiled "
            "step does not call; write an autograd.Function"
        )


def _is_own(thing: Any) -> bool:
    """Whether a class, or a function, is torch's or of this package."""
    return str(getattr(thing, "__module__", "")).startswith(_OWN)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Refuses dispatch modes that a forward enters: they would be handed composite calls whole,
    where eager has taken them apart, and never the calls of a backward.
    """
    push = _python_dispatch._push_mode

    def checked(mode: Any) -> None:
        if not _is_own(type(mode)):
            raise RecordError(
                f"{user_line()}: the forward enters the mode {type(mode).__name__}; {_MODE_REMEDY}"
            )
        push(mode)

    with replaced(_python_dispatch, "_push_mode", checked):
        yield


@contextlib.contextmanager
def same_flags() -> Iterator[None]:
    """Raises `RecordError` where switches of torch's or Python's are left otherwise than they were;
    sets them back.
    """
    before = {name: get() for name, (get, _) in _FLAGS.items()}
    done = False
    try:
        yield
        done = True
    finally:
        left = [name for name, (get, _) in _FLAGS.items() if get() != before[name]]
        for name in left:
            _FLAGS[name][1](before[name])
    if left and done:
        raise RecordError(
            f"the forward leaves {', '.join(left)} changed for what runs after it, which a "
            "compiled step does not; set it before auto_parallel, or set it back in the forward"
        )

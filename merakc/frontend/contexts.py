"""What has to hold around a model while its forward is recorded, and is undone after."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from merakc.errors import RecordError
from merakc.frontend.calls.forms import make_fake
from merakc.frontend.python.plain_tensors import check_state, keep_attributes
from merakc.frontend.python.state import PythonState
from merakc.frontend.replaced import in_this_thread, replaced
from merakc.frontend.source import is_installed, user_line

# How far clocks are put ahead: a number that is odd in days, hours, minutes and seconds.
CLOCK_S = 90061 * 401 + 0.4321


@contextlib.contextmanager
def untouched(model: torch.nn.Module, state: PythonState | None = None) -> Iterator[PythonState]:
    """Takes back what a forward does to the modules, and to their Python: its `state`."""
    state = PythonState(model) if state is None else state
    state.remembered.begin()
    try:
        yield state
    finally:
        state.put_back()


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a module holds a parameter or buffer, it, and the fake tensor put there."""

    states: dict[str, Any]
    key: str
    name: str
    fake: torch.Tensor
    real: torch.Tensor
    is_parameter: bool


def put_fakes(
    model: torch.nn.Module, fake_mode: FakeTensorMode, parameter_dtype: torch.dtype | None = None
) -> list[Slot]:
    """Puts fake tensors in the place of all parameters and buffers; a tied one has one slot.

    Those of floating parameters have `parameter_dtype`, if one is given.
    """
    fakes: dict[int, torch.Tensor] = {}
    slots: list[Slot] = []
    for path, module in model.named_modules():
        for states in (module._parameters, module._buffers):
            for key, tensor in states.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    name = f"{path}.{key}" if path else key
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    check_state(name, tensor, is_parameter=is_parameter)
                    fake = fakes[id(tensor)] = _fake(tensor, fake_mode, parameter_dtype)
                    slots.append(Slot(states, key, name, fake, tensor, is_parameter))
                states[key] = fakes[id(tensor)]
    return slots


def _fake(
    tensor: torch.Tensor, fake_mode: FakeTensorMode, parameter_dtype: torch.dtype | None
) -> torch.Tensor:
    is_cast = isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
    dtype = parameter_dtype if parameter_dtype and is_cast else tensor.dtype
    fake = make_fake(fake_mode, (tuple(tensor.shape), tensor.stride(), 0, dtype))
    keep_attributes(fake, tensor)
    if isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True  # all that `Parameter` does to a tensor of another class
        fake.requires_grad_(tensor.requires_grad)
    return fake


def _no_hook(*_: Any) -> None:
    """What a hook does in other threads."""


@dataclass(frozen=True)
class _Running:
    """The paths of the modules that run, the innermost last, and who is told of it."""

    names: list[str]
    passing: Callable[[], None]
    found: Callable[[str, torch.nn.Module], None]
    known: frozenset[int]  # the model's own modules

    def enter(self, path: str) -> None:
        """A module starts."""
        try:
            if self.names:
                self.passing()
        finally:
            self.names.append(path)  # torch calls `leave` also where this fails

    def leave(self, out: Any) -> None:
        """A module returns."""
        try:
            if out is not None:  # a forward that fails raises an error of its own
                self.passing()
        finally:
            self.names.pop()

    def enter_other(self, module: torch.nn.Module, _args: Any) -> None:
        """Any module starts: one that is not the model's is found."""
        if id(module) not in self.known and self.names:
            self.enter(f"{self.names[-1]}.{type(module).__name__}".strip("."))
            self.found(self.names[-1], module)

    def leave_other(self, module: torch.nn.Module, _args: Any, out: Any) -> None:
        """Any module returns."""
        if id(module) not in self.known and len(self.names) > 1:
            self.leave(out)

    def hook(self, path: str, module: torch.nn.Module) -> Iterator[Any]:
        """Hooks of one of the model's modules; their handles."""
        yield module.register_forward_pre_hook(lambda *_: self.enter(path), prepend=True)
        yield module.register_forward_hook(lambda *given: self.leave(given[-1]), always_call=True)


@contextlib.contextmanager
def module_names(
    model: torch.nn.Module,
    names: list[str],
    passing: Callable[[], None] = lambda: None,
    found: Callable[[str, torch.nn.Module], None] = lambda name, module: None,
) -> Iterator[None]:
    """Keeps the path of the module that is running on top of `names`.

    `passing` is called whenever a module starts or returns, while the one that ran until then is
    still on top. A module that is none of the model's, as a forward may make one, is `found` as it
    starts, under the path of what calls it and its class.
    """
    running = _Running(names, passing, found, frozenset(map(id, model.modules())))
    handles = [h for path, module in model.named_modules() for h in running.hook(path, module)]
    # Modules that other threads call are no part of the forward.
    enter, leave = (in_this_thread(f, _no_hook) for f in (running.enter_other, running.leave_other))
    handles.append(register_module_forward_pre_hook(enter))
    handles.append(register_module_forward_hook(leave, always_call=True))
    try:
        with warnings.catch_warnings():  # a compiled module is recorded as what it wraps
            warnings.filterwarnings("ignore", message="Using `torch.compile")
            yield
    finally:
        for handle in handles:
            handle.remove()


_LOG_OF_FAKES = logging.getLogger("torch._subclasses.fake_tensor")


def _nothing(entry: logging.LogRecord) -> bool:
    """Lets no entry of a log pass."""
    return False


@contextlib.contextmanager
def recordable(checked: Callable[..., None]) -> Iterator[None]:
    """Checks of a tensor's values are `checked`, and LSTMs are taken apart as on any device: torch
    has a kernel for whole layers that runs on CPUs only. Why a call on fake tensors fails is in the
    error that is raised, and not logged besides.
    """
    mkldnn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    _LOG_OF_FAKES.addFilter(_nothing)
    try:
        with replaced(torch, "_check_tensor_all_with", checked):
            yield
    finally:
        _LOG_OF_FAKES.removeFilter(_nothing)
        torch._C._set_mkldnn_enabled(mkldnn)


class _ForLibraries:
    """A flag that is true where an installed library asks in the thread that records; to the user's
    own code, and in other threads, all is eager.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()


def _told(name: str) -> Callable[..., Any]:
    """A method of `bool`, of what its caller is told."""

    def call(flag: _ForLibraries, *args: Any) -> Any:
        asked = flag.thread == threading.get_ident() and is_installed(sys._getframe(1).f_code)
        return getattr(asked, name)(*args)

    return call


for _name in ("bool", "int", "index", "eq", "ne", "hash", "repr", "and", "rand", "or", "ror", "xor",
              "rxor"):  # fmt: skip
    setattr(_ForLibraries, f"__{_name}__", _told(f"__{_name}__"))


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """torch.compiler's flags as during export, so that libraries take their safe branches: in them,
    no tensor's values are read. Not all compute what the others do, and some only nearly. Nothing
    says that the branches of the user's own code do.
    """
    with _flagged(_ForLibraries()):
        yield


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Undoes `exporting` inside it: libraries do what they do when the model runs."""
    with _flagged(False):
        yield


@contextlib.contextmanager
def _flagged(flag: object) -> Iterator[None]:
    with (
        replaced(torch.compiler, "_is_compiling_flag", flag),
        replaced(torch.compiler, "_is_exporting_flag", flag),
    ):
        yield


@contextlib.contextmanager
def fixed_dtypes() -> Iterator[None]:
    """Refuses `module.to(...)` in a forward that changes something; what changes nothing passes.

    torch would put new parameters in the place of the fake ones, which it cannot.
    """

    def apply(module: torch.nn.Module, change: Callable[..., Any], recurse: bool = True) -> Any:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            changed = change(tensor)
            if changed.dtype != tensor.dtype or changed.device != tensor.device:
                raise RecordError(
                    f"{user_line()}: a forward that casts its own {type(module).__name__}, of "
                    f"which '{name}' is {tensor.dtype}, to {changed.dtype}; cast it before merakc "
                    "sees the model"
                )
        return module

    with replaced(torch.nn.Module, "_apply", apply):
        yield


@contextlib.contextmanager
def clocks_ahead() -> Iterator[None]:
    """Puts the clocks of `time` ahead, so that a forward that reads one is seen to."""
    names = ("time", "monotonic", "perf_counter", "process_time")
    with contextlib.ExitStack() as stack:
        for name, scale in [*((n, 1.0) for n in names), *((f"{n}_ns", 1e9) for n in names)]:
            stack.enter_context(replaced(time, name, _ahead(getattr(time, name), scale)))
        yield


def _ahead(clock: Callable[[], Any], scale: float) -> Callable[[], Any]:
    return lambda: clock() + type(clock())(CLOCK_S * scale)

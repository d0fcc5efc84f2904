"""Modules that run as they are: what a graph cannot say becomes one node of `merakc.opaque`.

Where a call inside a module depends on the data, the forward is recorded again with that module as
one node, which reads the module's arguments, parameters and buffers. The shapes of what it returns
are seen by running it on random numbers.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from merakc.errors import RecordError
from merakc.frontend.calls.communication import Silence
from merakc.frontend.carried import CarriedError, check_repeats
from merakc.frontend.contexts import eager, untouched
from merakc.frontend.history import AskedError, unasked
from merakc.kernels.opaque import Spec, autograd_reachable, drawing

# Arguments and results of a module that are no tensors, and can be kept as they are.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
# Enough to see whether shapes depend on the data: they would have to agree by chance.
DRAWS = 2


class UntraceableError(RecordError):
    """A call that no graph can hold, and the modules that were running, the innermost last.

    `refused` is the module that was tried as one node and cannot be one.
    """

    def __init__(
        self,
        message: str,
        stack: Sequence[str] = (),
        source: str = "",
        reason: str = "",
        refused: str = "",
    ) -> None:
        super().__init__(message)
        self.stack, self.source, self.reason, self.refused = tuple(stack), source, reason, refused


@dataclass(slots=True)
class Fallbacks:
    """Which modules of a model run as they are, and the error that each was chosen for.

    Others than its own, which a forward makes, are `loose`: the class of each.
    """

    modules: Mapping[str, nn.Module]
    loose: dict[str, type[nn.Module]] = field(default_factory=dict)
    causes: dict[str, UntraceableError] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def add(self, error: UntraceableError) -> None:
        """Chooses the innermost module around an error that can still be one node; of modules that
        a forward has made, the outermost: what they compute with is given to it, and it may go
        through the samples one by one.

        Other modules of its class are chosen with it: they would fail alike, one recording later.
        Raises it as a `RecordError` where none but the model itself is left.
        """
        cause = error
        if error.refused:
            cause = self.causes[error.refused]
            cause.add_note(f"module '{error.refused}' cannot run as it is either: {error.reason}")
            for path in self._alike(error.refused):
                self.causes.pop(path, None)
                self.refused.add(path)
        loose = [path for path in error.stack if path in self.loose]
        own = [path for path in reversed(error.stack) if path not in self.loose]
        for path in (*loose, *own):
            if path and path not in self.refused and path not in self.causes:
                self.causes |= dict.fromkeys(self._alike(path), cause)
                return
        final = RecordError(str(cause))
        for note in getattr(cause, "__notes__", ()):
            final.add_note(note)
        raise final from cause

    def _alike(self, path: str) -> list[str]:
        if path in self.loose:
            return [path]
        kind = type(self.modules[path])
        if kind.__module__.startswith("torch.nn"):  # a container says nothing about its contents
            return [path]
        return [p for p, m in self.modules.items() if p and type(m) is kind]


class CannotBeNodeError(RecordError):
    """Why a module's call cannot be one node."""


class FailsError(CannotBeNodeError):
    """A module that fails on random arguments, as it may where it checks them."""


class _Holder(nn.Module):
    """Calls a module's own forward and looks at its buffers before they are put back."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.own = module, forward

    def forward(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        out = self.own(*args, **kwargs)
        return out, dict(self.module.named_buffers(remove_duplicate=False))


@dataclass(frozen=True)
class Result:
    """What a module returned: its tensors, then its buffers after the call; and the structure.

    `leaves` are the results, with the class in the place of each tensor.
    """

    tensors: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    @property
    def form(self) -> tuple[Any, ...]:
        """All but the values of the tensors."""
        return tuple(map(_spec, self.tensors)), self.leaves, self.structure


@dataclass(eq=False)
class ModuleCall:
    """A call of a module as a function of tensors: its arguments', its parameters, its buffers.

    `leaves` are its arguments, with the class in the place of each tensor; `parameters` and
    `buffers` the names of its state, all names of each. The buffers come back after the results,
    for a branch that no trial takes may write them. `form` is what trials saw it return.
    """

    module: nn.Module
    forward: Callable[..., Any]
    leaves: list[Any]
    structure: pytree.TreeSpec
    parameters: list[list[str]]
    buffers: list[list[str]]
    autocast: tuple[bool, torch.dtype]
    default_dtype: torch.dtype
    form: tuple[Any, ...] | None = None

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors among the results, and the buffers.

        Raises `RecordError` where the module does what it did in no trial.
        """
        try:
            result = self.run(inputs)
            if self.form is None or _any_float(result.form) != _any_float(self.form):
                raise CannotBeNodeError("it returns other shapes or values")
        except CannotBeNodeError as error:
            raise RecordError(
                f"{type(self.module).__name__} runs as it is because it cannot be recorded, and "
                f"did what it did on no random arguments: {error}; make shapes and side effects "
                "the same for all data"
            ) from error
        return result.tensors

    @contextlib.contextmanager
    def holding(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Puts the parameters among `inputs` in their places in the module."""
        last = len(inputs) - len(self.buffers)
        held = inputs[last - len(self.parameters) : last]
        pairs = zip(self.parameters, held, strict=True)
        state = {name: x for names, x in pairs for name in names}
        with torch.nn.utils.stateless._reparametrize_module(self.module, state):
            yield

    def run(self, inputs: Sequence[Tensor]) -> Result:
        """Runs the forward. Raises `CannotBeNodeError` where it changes what a node must not."""
        given = list(inputs)
        count = len(given) - len(self.buffers)
        versions = [x._version for x in given[:count]]
        buffers = {
            names[0]: x.clone() for names, x in zip(self.buffers, given[count:], strict=True)
        }
        now = iter(given)
        leaves = [next(now) if x is Tensor else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        state = {f"module.{n}": x for names in self.parameters for x in (next(now),) for n in names}
        state |= {f"module.{n}": buffers[names[0]] for names in self.buffers for n in names}
        enabled, dtype = self.autocast
        device = next((x.device.type for x in inputs), "cpu")
        with torch.autocast(device, dtype, enabled), default_dtype(self.default_dtype):
            out, after = torch.func.functional_call(
                _Holder(self.module, self.forward), state, (args, kwargs)
            )
        if [x._version for x in given[:count]] != versions:
            raise CannotBeNodeError("it writes to its arguments or parameters")
        for name, before in buffers.items():
            if _spec(after[name]) != _spec(before):
                raise CannotBeNodeError(f"it changes the shape of its buffer '{name}'")
        leaves, structure = pytree.tree_flatten(out)
        marked = tuple(Tensor if isinstance(x, Tensor) else x for x in leaves)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        return Result((*tensors, *(after[name] for name in buffers)), marked, structure)


def module_call(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[ModuleCall, list[Tensor]]:
    """A call of a module, and the tensors that it reads."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    leaves = [Tensor if isinstance(x, Tensor) else x for x in leaves]
    parameters, held = _by_tensor(module.named_parameters(remove_duplicate=False))
    buffers, more = _by_tensor(module.named_buffers(remove_duplicate=False))
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    call = ModuleCall(
        module, forward, leaves, structure, parameters, buffers,
        autocast=autocast, default_dtype=torch.get_default_dtype(),
    )  # fmt: skip
    return call, [*tensors, *held, *more]


def _by_tensor(named: Iterable[tuple[str, Tensor]]) -> tuple[list[list[str]], list[Tensor]]:
    """The names of each tensor, and the tensors."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return [names for names, _ in found.values()], [tensor for _, tensor in found.values()]


def try_out(
    call: ModuleCall, specs: Sequence[Spec], state: Sequence[tuple[Tensor, torch.dtype]]
) -> tuple[Result, int]:
    """Runs a call on random arguments of these specs, and on the module's own weights, each in a
    dtype.

    Returns what it gave, and the flops. Raises `CannotBeNodeError` where what it returns depends on
    the data in more than values, or where it leaves something behind that a node cannot.
    """
    for leaf in call.leaves:
        if leaf is not Tensor and not isinstance(leaf, PLAIN):
            raise CannotBeNodeError(f"it is given an object of type {type(leaf).__name__}")
    try:
        found = _tries(call, specs, state, torch.randn)
    except FailsError as error:
        try:  # sizes and shares are positive
            found = _tries(call, specs, state, torch.rand)
        except FailsError:
            raise error from None
    first = found[0][0]
    for other, _ in found[1:]:
        if other.form[0] != first.form[0] or other.structure != first.structure:
            raise CannotBeNodeError("the shapes of what it returns depend on the data")
        if other.leaves != first.leaves:
            raise CannotBeNodeError("it returns a number that depends on the data")
    call.form = first.form
    return found[0]


def _tries(
    call: ModuleCall,
    specs: Sequence[Spec],
    state: Sequence[tuple[Tensor, torch.dtype]],
    draw: Callable[..., Tensor],
) -> list[tuple[Result, int]]:
    """What a call gives on several random arguments, and the flops of each."""
    found = []
    with _disable_current_modes(), eager(), autograd_reachable():
        for number in range(DRAWS):
            with drawing((), number, ()):
                weights = [_weight(t, dtype) for t, dtype in state]
                values = [_random(shape, dtype, number, draw) for shape, dtype in specs]
                found.append(_observe(call, [*values, *weights]))
    return found


def _observe(call: ModuleCall, inputs: Sequence[Tensor]) -> tuple[Result, int]:
    """One run, and its flops."""
    held = _held(call.module)
    counter = FlopCounterMode(display=False)
    with untouched(call.module) as state, torch.no_grad():
        try:
            with Silence(), counter, unasked():  # type: ignore[no-untyped-call]
                result = call.run(inputs)
            check_repeats(state, lambda: call.run(inputs))
        except (CarriedError, AskedError) as error:
            raise CannotBeNodeError(str(error)) from error
        except RecordError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise FailsError(f"it fails on random arguments ({text})") from error
        kept = _held(call.module) - held
    if kept:
        names = ", ".join(sorted({name for name, _ in kept}))
        raise CannotBeNodeError(f"it leaves tensors in attributes: {names}")
    if not all(x is Tensor or isinstance(x, PLAIN) for x in result.leaves):
        raise CannotBeNodeError("it returns objects that are no tensors")
    return result, int(counter.get_total_flops())


def _held(module: nn.Module) -> set[tuple[str, int]]:
    """The attributes of a module's parts that hold tensors, with the identity of each."""
    found: set[tuple[str, int]] = set()
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
            found |= {(f"{path}.{name}".strip("."), id(x)) for x in tensors}
    return found


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The dtype that tensors are made in where none is said, as it was in the forward."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _any_float(form: tuple[Any, ...]) -> tuple[Any, ...]:
    """A form whatever the precision: a check of the graph may run it in another."""
    specs, *rest = form
    return [(shape, d.is_floating_point or d) for shape, d in specs], *rest


def _spec(tensor: Tensor) -> Spec:
    return tuple(tensor.shape), tensor.dtype


def _weight(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter or buffer on the CPU; on the meta device it has small random values."""
    if not tensor.is_meta:
        return tensor.detach().cpu().to(dtype, copy=True)
    if dtype.is_floating_point:
        return torch.randn(tensor.shape, dtype=dtype) * 0.1
    return torch.zeros(tensor.shape, dtype=dtype)


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, number: int, draw: Callable[..., Tensor]
) -> Tensor:
    """Values of the `number`-th draw. The first integers are zeros, the first booleans true."""
    if dtype.is_floating_point or dtype.is_complex:
        return draw(shape, dtype=dtype)
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5 if number else torch.ones(shape, dtype=dtype)
    return torch.randint(0, 2 if number else 1, shape).to(dtype)

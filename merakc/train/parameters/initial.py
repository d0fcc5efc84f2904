"""A model's own initial weights, where it stands on the meta device: made one after the other."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from merakc.errors import ConfigError
from merakc.frontend.python.plain_tensors import keep_attributes

Tensors = dict[str, torch.Tensor]
Keep = Callable[[str, torch.Tensor], None]
# Of the tensors that were written last so many bytes stay; smaller tensors all stay.
RECENT_BYTES, SMALL_BYTES = 1 << 26, 1 << 18
# transformers marks what from_pretrained has read, parameters and modules, and initialises it not.
READ_BEFORE = "_is_hf_initialized"
# What writes every element of a tensor and reads none of it.
_OVERWRITES = (
    "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_",
    "log_normal_", "cauchy_", "geometric_",
)  # fmt: skip


def replace_tensors(
    model: nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor | None]
) -> None:
    """Puts `make(name, tensor)` in the place of every parameter and buffer, by their first names,
    one after the other; each is let go of before the next is made. What gives None stays.

    Ties are kept; parameters stay parameters, and frozen ones frozen.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    places: dict[int, list[tuple[dict[str, torch.Tensor | None], str]]] = {}
    for path, module in model.named_modules():
        states: tuple[dict[str, torch.Tensor | None], ...]
        states = module._parameters, module._buffers
        for own in states:
            for key, tensor in own.items():
                if tensor is not None:
                    found.setdefault(id(tensor), (f"{path}.{key}" if path else key, tensor))
                    places.setdefault(id(tensor), []).append((own, key))
    # In an order that is the same on all ranks, which may tell each other each.
    for number, where in sorted(places.items(), key=lambda one: found[one[0]][0]):
        name, tensor = found.pop(number)
        new = make(name, tensor.detach())
        if new is None:
            continue
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        keep_attributes(new, tensor)
        for own, key in where:
            own[key] = new


def initialise(
    model: nn.Module, seed: int, only: Collection[str] | None = None, keep: Keep | None = None
) -> None:
    """Gives a model on the meta device its own initial weights, on the CPU.

    A model with `init_weights` (transformers) is initialised by that; of any other, each module's
    `reset_parameters` is called, outer modules first. `seed` alone determines the weights, so they
    are the same on every rank and layout; the random state is restored.

    With `only`, of all tensors those of these first names. With `keep(name, tensor)` none stays in
    the model: it is called with each, the last time with what it is to be, and few tensors more
    than the largest are in memory at once.

    Raises `ConfigError` where only some parameters are on the meta device, for one that
    `from_pretrained` put there, and for a tensor that the model does not initialise.
    """
    named = dict([*model.named_parameters(), *model.named_buffers()])
    wanted = set(named if only is None else only)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and name in wanted:
            raise ConfigError(
                f"parameter '{name}' is on {parameter.device} while others of "
                f"{type(model).__name__} are on the meta device; put all of them there, or none"
            )
    made = {name for name in wanted if named[name].is_meta}
    for name in made:
        if getattr(named[name], READ_BEFORE, False):
            raise ConfigError(
                f"'{name}' was read by from_pretrained onto the meta device, which keeps no "
                "values; give auto_parallel the folder that it was read from, as weights="
            )
    try:
        _Initialiser(model, made, keep, None if keep is None else RECENT_BYTES).run(seed)
    except _GoneError:  # one was read long after it was made: then all are made at once
        _Initialiser(model, made, keep, None).run(seed)
    if keep is not None:
        for name in wanted - made:
            keep(name, named[name].detach())


class _GoneError(Exception):
    """A tensor was read after it had been handed on."""


class _Initialiser(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what the model's own code writes into the tensors `made`.

    Those that were written are handed to `keep` when others were written since, of more than
    `recent_bytes`, and their memory is given back. What overwrites one afterwards may do so; what
    would read it raises `_GoneError`.
    """

    def __init__(
        self, model: nn.Module, made: Collection[str], keep: Keep | None, recent_bytes: int | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.keep, self.recent_bytes = model, keep, recent_bytes
        self.tensors: Tensors = {}
        self.memory: dict[str, mmap.mmap] = {}
        self.written: dict[str, None] = {}  # those that are in memory, the latest last
        self.gone: set[str] = set()

        def zeros(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
            if name not in made:
                return None
            self.tensors[name] = self._zeros(name, tensor)
            return self.tensors[name]

        replace_tensors(model, zeros)
        self.names = {t.untyped_storage()._cdata: n for n, t in self.tensors.items()}

    def _zeros(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Memory that takes none before it is written, and that can be given back."""
        if self.recent_bytes is None or tensor.nbytes < SMALL_BYTES:
            return torch.zeros_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory[name] = memory = mmap.mmap(-1, tensor.nbytes, flags=flags)
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)

    def run(self, seed: int) -> None:
        """Initialises the model."""
        with torch.random.fork_rng(devices=[]), self:
            torch.manual_seed(seed)
            whole = getattr(self.model, "init_weights", None)
            if callable(whole):
                for module in self.model.modules():
                    vars(module).pop(READ_BEFORE, None)  # or it would be passed over
                whole()
            else:
                for module in self.model.modules():
                    reset = _reset_of(module)
                    if reset is not None:
                        reset()
        self._finish()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation, once it is known to read nothing that is gone."""
        kwargs = kwargs or {}
        touched = list(self._touched(func, args, kwargs))
        for name, tensor, writes in touched:
            overwrites = (
                writes
                and func.overloadpacket.__name__ in _OVERWRITES
                and tensor.numel() == self.tensors[name].numel()
            )
            if name in self.gone and not func.is_view and not overwrites:
                raise _GoneError
        found = func(*args, **kwargs)
        for name, _, writes in touched:
            if writes:
                self.gone.discard(name)
                self.written.pop(name, None)
                self.written[name] = None
        if self.recent_bytes is not None:
            self._hand_on(self.recent_bytes)
        return found

    def _touched(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """The tensors of the model among the arguments, by name, and whether they are written."""
        told = func._schema.arguments
        given = [*zip(told, args, strict=False), *((a, kwargs.get(a.name)) for a in told)]
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                    name = self.names.get(leaf.untyped_storage()._cdata)
                    if name is not None:
                        yield name, leaf, writes

    def _hand_on(self, most_bytes: int) -> None:
        """Hands on those that were written first, until the others are of so many bytes."""
        held = {n: len(self.memory[n]) for n in self.written if n in self.memory}
        for name in list(held)[: -1 if most_bytes else None]:
            if sum(held.values()) <= most_bytes:
                return
            assert self.keep is not None
            self.keep(name, self.tensors[name])
            self.memory[name].madvise(mmap.MADV_DONTNEED)
            self.gone.add(name)
            del self.written[name], held[name]

    def _finish(self) -> None:
        """Hands on what is left, and leaves the model empty, unless nobody keeps it."""
        now = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        for name in self.tensors:
            tensor = now.get(name)
            if tensor is None or (self._is_own(name, tensor) and not self._is_made(name)):
                raise ConfigError(self._why(name))
            if self.keep is not None and name not in self.gone:
                self.keep(name, tensor.detach())
        if self.keep is not None:
            replace_tensors(
                self.model,
                lambda n, t: torch.empty_like(t, device="meta") if n in self.tensors else None,
            )

    def _is_own(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether it is the memory that was given for it, not another's of the model's making."""
        return tensor.is_meta or self.names.get(tensor.untyped_storage()._cdata) == name

    def _is_made(self, name: str) -> bool:
        return name in self.written or name in self.gone or not self.tensors[name].numel()

    def _why(self, name: str) -> str:
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        where = f"module '{path}' ({type(module).__name__})"
        remedy = "build the model on the CPU, or give the module one that sets it"
        if not callable(getattr(self.model, "init_weights", None)) and _reset_of(module) is None:
            return f"{where} is on the meta device and has no reset_parameters; {remedy}"
        return (
            f"'{leaf}' of {where} is on the meta device, and the model's own reset_parameters or "
            f"init_weights does not set it; {remedy}"
        )


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    # The second is torch.nn.MultiheadAttention's.
    found = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    return found if callable(found) else None

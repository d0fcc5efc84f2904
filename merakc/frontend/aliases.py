"""Functionalisation while recording: writes through views become new values of their base.

Every tensor seen belongs to a storage. A view remembers its parent and the call that made it. A
write gives the written tensor a new value, scatters it back through its parents up to the base,
and marks the other views of the storage stale: they are made again from their parents when read.
One of several views made by one call (`split`, `unbind`) is remembered as a slice of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import accumulate, count, islice, pairwise
from typing import Any

import torch

from merakc.errors import RecordError
from merakc.frontend.source import user_line
from merakc.frontend.values.symbols import number
from merakc.ir.graph import Ref, TensorSpec

Emit = Callable[[str, tuple[Any, ...], TensorSpec], Ref]
"""`emit(op, args, spec)` adds a node with one output."""

# Views whose inverse is a reshape to the parent's shape.
RESHAPES = ("view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "unflatten", "flatten")
IDENTITIES = ("detach", "alias", "lift_fresh", "contiguous", "to", "view_as")
OVERWRITTEN = "merakc.overwritten.default"
SPLITS = ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")


@dataclass(slots=True)
class Storage:
    """What all views of one piece of memory share."""

    version: int = 0
    target: str = ""  # the parameter or buffer that owns it
    is_parameter: bool = False
    outside: bool = False  # of the model: of a tensor that is neither parameter nor buffer
    written: bool = False
    source: str = ""  # the line that wrote to it


@dataclass(slots=True, eq=False)
class Alias:
    """A tensor of the recording and the value that it now has."""

    tensor: torch.Tensor
    spec: TensorSpec  # at the time: the tensor itself may be made to show something else
    ref: Ref
    storage: Storage
    version: int
    grad: bool  # whether gradients were switched on when it was made
    parent: Alias | None = None
    op: str = ""
    args: tuple[Any, ...] = ()


@dataclass(slots=True)
class Aliases:
    """All tensors seen, by identity. They are kept alive so that an `id` is never used twice."""

    emit: Emit
    known: dict[int, Alias] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)

    def find(self, tensor: torch.Tensor) -> Alias | None:
        """The alias of a tensor seen before."""
        return self.known.get(id(tensor))

    def add(
        self,
        tensor: torch.Tensor,
        ref: Ref,
        storage: Storage | None = None,
        spec: TensorSpec | None = None,
    ) -> Alias:
        """A tensor with memory of its own."""
        storage, spec = storage or Storage(), spec or spec_of(tensor)
        grad = torch.is_grad_enabled()
        alias = Alias(tensor, spec, ref, storage, storage.version, grad)
        self.known[id(tensor)] = alias
        return alias

    def add_view(
        self, tensor: torch.Tensor, ref: Ref, parent: Alias, op: str, args: tuple[Any, ...]
    ) -> None:
        """A tensor that shares its parent's memory. `args` are the call's, after the tensor."""
        op, args = _single(op, args, ref.index, parent.spec.shape)
        storage, grad = parent.storage, torch.is_grad_enabled()
        self.known[id(tensor)] = Alias(
            tensor,
            spec_of(tensor),
            ref,
            storage=storage,
            version=storage.version,
            grad=grad,
            parent=parent,
            op=op,
            args=args,
        )

    def share(self, tensor: torch.Tensor, alias: Alias) -> None:
        """A tensor that is another one in all but identity."""
        self.known[id(tensor)] = alias
        self.kept.append(tensor)

    def ref(self, alias: Alias) -> Ref:
        """The value of a tensor now, made again if its memory was written since."""
        if alias.version != alias.storage.version:
            assert alias.parent is not None, "a base is never stale"
            parent = self.ref(alias.parent)
            with torch.set_grad_enabled(alias.grad):
                alias.ref = self.emit(alias.op, (parent, *alias.args), alias.spec)
            alias.version = alias.storage.version
        return alias.ref

    def write(self, alias: Alias, ref: Ref, grads: Container[Ref]) -> None:
        """Gives the tensor a new value, and with it everything that shares its memory.

        `grads` holds the values that require a gradient; written under `no_grad`, they keep that of
        the old value. Raises `RecordError` where no value of the graph is what the write leaves
        behind.
        """
        storage = alias.storage
        if storage.is_parameter:
            raise RecordError(
                f"the model writes to its parameter '{storage.target}' in its forward; "
                "move the change out of forward, or make it a buffer"
            )
        chain = [alias]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        before = [self.ref(item) for item in chain]
        detached = any(".detach" in item.op for item in chain)
        if detached and before[-1] in grads:
            raise RecordError(
                "in-place write that autograd does not see (detach or .data) to a tensor that "
                "requires a gradient, which stays that of the old value, as do values kept for it; "
                "write to a clone, or under torch.no_grad()"
            )
        alias.ref = ref
        for child, parent in pairwise(chain):
            parent.ref = self._scatter(child, parent)
        storage.version += 1
        storage.written, storage.source = True, user_line()
        if not torch.is_grad_enabled() and before[-1] in grads:
            base = chain[-1]
            with torch.enable_grad():
                base.ref = self.emit(OVERWRITTEN, (before[-1], base.ref), base.spec)
            chain = [base]
        for item in chain:
            item.version = storage.version

    def _scatter(self, child: Alias, parent: Alias) -> Ref:
        """The parent's value after its view `child` was given a new one."""
        name = child.op.split(".")[1]
        spec = parent.spec

        def emit(op: str, *args: Any) -> Ref:
            return self.emit(op, args, spec)

        if child.spec.dtype == spec.dtype:
            if name in IDENTITIES:
                return child.ref
            if name in RESHAPES:
                return emit("aten.reshape.default", child.ref, spec.shape)
            if name in ("transpose", "t"):
                return emit(child.op, child.ref, *child.args)
            if name == "permute":
                order = [d % len(spec.shape) for d in child.args[0]]
                inverse = tuple(order.index(k) for k in range(len(order)))
                return emit("aten.permute.default", child.ref, inverse)
            if name in ("slice", "select", "diagonal"):
                op = f"aten.{name}_scatter.default"
                if spec.dtype.is_complex and name != "diagonal":
                    return self._scatter_real(op, child, parent)
                return emit(op, parent.ref, child.ref, *child.args)
        raise RecordError(
            f"in-place write through a view made by {child.op}, which merakc cannot undo; "
            "write to a clone instead"
        )

    def _scatter_real(self, op: str, child: Alias, parent: Alias) -> Ref:
        """The same of complex numbers, by their parts: torch differentiates no more of them."""
        spec, dim = parent.spec, (child.args[0] if child.args else 0) % len(parent.spec.shape)
        real = spec._replace(shape=(*spec.shape, 2), dtype=spec.dtype.to_real())
        parts = [
            self.emit(
                "aten.view_as_real.default",
                (self._resolved(of),),
                real._replace(shape=(*of.spec.shape, 2)),
            )
            for of in (parent, child)
        ]
        found = self.emit(op, (*parts, dim, *child.args[1:]), real)
        return self.emit("aten.view_as_complex.default", (found,), spec)

    def _resolved(self, of: Alias) -> Ref:
        """A value of which no number waits to be conjugated."""
        return self.emit("aten.clone.default", (of.ref,), of.spec)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor of the recording; a size that follows from values is a `Number`."""
    shape = tuple(tensor.shape)
    if tensor._has_symbolic_sizes_strides:
        shape = tuple(map(number, shape))
    return TensorSpec(shape, tensor.dtype)


def _single(
    op: str, args: tuple[Any, ...], index: int, shape: tuple[int, ...]
) -> tuple[str, tuple[Any, ...]]:
    """The call that makes the `index`-th view alone, where `op` makes several."""
    name = op.split(".")[1]
    if name == "unbind":
        return "aten.select.int", (args[0] if args else 0, index)
    if name in SPLITS:
        sizes = args[0]
        dim = args[1] if len(args) > 1 else 0
        ends = accumulate(sizes) if isinstance(sizes, tuple) else count(sizes, sizes)
        end = next(islice(ends, index, None))
        start = end - (sizes[index] if isinstance(sizes, tuple) else sizes)
        return "aten.slice.Tensor", (dim, start, min(end, shape[dim]))
    return op, args

"""Traces a function of fake tensors to a list of calls, below autograd.

Like `make_fx`, in a third of its time: a call is written down as it passes, without a proxy for
every value. What cannot be followed so is left to `make_fx`: calls that write, and values that
come from nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from merakc.ir.graph import Input, InputKind, Node, Ref, TensorSpec

# Arguments that say where results live: the runtime decides.
PLACES = ("device", "layout", "pin_memory")


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, calls on tensors become `nodes`.

    `given` are the tensors that are there before. Real tensors that turn up are `constants`, by the
    names of their `inputs`. Node and constant names are those that `make_fx` would give. `unclear`
    says what could not be written down, if anything: autograd, which calls from where nothing may
    be raised, goes on.
    """

    def __init__(self, given: Mapping[Ref, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.unclear = ""
        self._names = fx.Graph()._graph_namespace
        # With the tensors themselves: one that was gone might leave its id to another.
        self._refs = {id(x): (ref, x) for ref, x in given.items()}

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The inputs that the constants are."""
        return tuple(
            Input(name, InputKind.CONSTANT, TensorSpec(tuple(x.shape), x.dtype))
            for name, x in self.constants.items()
        )

    def ref(self, x: torch.Tensor) -> Ref:
        """The name of a tensor."""
        found = self._refs.get(id(x))
        if found is not None:
            return found[0]
        if isinstance(x, FakeTensor):
            self.unclear = "a value that no call has made"
        name = f"traced:_tensor_constant{len(self.constants)}"
        self.constants[name] = x
        self._refs[id(x)] = Ref(name), x
        return Ref(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the call and writes it down."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if func._schema.is_mutable:
            self.unclear = f"{func} writes"
        if not any(isinstance(o, torch.Tensor) for o in outs):
            return out  # a device or a size, or a constant's number
        name = f"j:{self._names.create_name(func.overloadpacket.__name__, None)}"
        own = tuple(self._value(a) for a in args)
        named = tuple((k, self._value(v)) for k, v in kwargs.items() if k not in PLACES)
        specs = tuple(
            TensorSpec(tuple(o.shape), o.dtype) if isinstance(o, torch.Tensor) else None
            for o in outs
        )
        self.nodes.append(Node(name, str(func), own, named, specs))
        for k, o in enumerate(outs):
            if isinstance(o, torch.Tensor):
                self._refs[id(o)] = Ref(name, k), o
        return out

    def _value(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return self.ref(arg)
        if isinstance(arg, (list, tuple)):
            return tuple([self._value(a) for a in arg])
        return arg

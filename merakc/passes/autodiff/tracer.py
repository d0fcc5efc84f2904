"""Traces a function of fake tensors to a list of calls, below autograd.

Like `make_fx`, in a third of its time: a call is written down as it passes, without a proxy for
every value. What cannot be followed so is left to `make_fx`: calls that write to what others see,
and values that come from nowhere.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.fx as fx
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from merakc.frontend.calls.forms import Forms, make_meta
from merakc.ir.graph import Input, InputKind, Node, Ref, TensorSpec
from merakc.kernels.ops import makes_tensor

# Arguments that say where results live: the runtime decides.
PLACES = ("device", "layout", "pin_memory")


def inputs_of(constants: Mapping[str, torch.Tensor]) -> tuple[Input, ...]:
    """The inputs that constants are."""
    return tuple(
        Input(name, InputKind.CONSTANT, TensorSpec(tuple(x.shape), x.dtype))
        for name, x in constants.items()
    )


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, calls on tensors become `nodes`.

    `given` are the tensors that are there before. Real tensors that turn up are `constants`, by the
    names of their `inputs`. Node and constant names are those that `make_fx` would give. `unclear`
    says what could not be written down, if anything: autograd, which calls from where nothing may
    be raised, goes on. A call that writes to what another call has made, before anything has a view
    of it, is the call that returns a new value.
    """

    def __init__(self, given: Mapping[Ref, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.unclear = ""
        self._origins: list[Node] = []  # the nodes that ran, each with
        self._firsts: list[int] = []  # the number of the first that autograd has made in it
        self._names = fx.Graph()._graph_namespace
        # With the tensors themselves: one that was gone might leave its id to another.
        self._refs = {id(x): (ref, x) for ref, x in given.items()}
        # How many tensors are seen in each memory, of which one alone may be written to.
        self._seen = Counter(2 * [_memory(x) for x in given.values()])
        self.on_meta = any(x.device.type == "meta" for x in given.values())
        self._forms = Forms(make_meta, lambda x: x.is_meta)

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The inputs that the constants are."""
        return inputs_of(self.constants)

    def at(self, node: Node) -> None:
        """The calls that come are of this node, until the next one; so are those of its backward,
        which autograd makes later.
        """
        self._origins.append(node)
        self._firsts.append(_get_sequence_nr())

    def _origin(self) -> tuple[str, str]:
        """The module and the source of what calls."""
        place = len(self._origins) - 1
        running = torch._C._current_autograd_node()
        if running is not None:
            place = bisect_right(self._firsts, running._sequence_nr()) - 1
        if place < 0:
            return "", ""
        return self._origins[place].module, self._origins[place].source

    def give(self, given: Mapping[Ref, torch.Tensor]) -> None:
        """Tensors that are there from now on, under these names."""
        self._refs.update((id(x), (ref, x)) for ref, x in given.items())
        self._seen.update(2 * [_memory(x) for x in given.values()])

    def ref(self, x: torch.Tensor) -> Ref:
        """The name of a tensor."""
        found = self._refs.get(id(x))
        if found is not None:
            return found[0]
        if isinstance(x, FakeTensor) or x.is_meta:
            self.unclear = "a value that no call has made"
        name = f"traced:_tensor_constant{len(self.constants)}"
        self.constants[name] = x
        self.give({Ref(name): x})
        return Ref(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the call and writes it down."""
        if func is torch.ops.prim.device.default:  # which a fake tensor asks of itself
            return func(*args)
        kwargs = kwargs or {}
        traits = _traits(func)
        out = self._on_meta(func, traits, args, kwargs) if self.on_meta else func(*args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if traits.writes and not self._may_write(traits, args, kwargs):
            self.unclear = f"{func} writes"
        if not any(isinstance(o, torch.Tensor) for o in outs):
            return out  # a device or a size, or a constant's number
        name = sys.intern(f"j:{self._names.create_name(traits.short, None)}")
        own = tuple([self._value(a) for a in args])
        named = tuple([(k, self._value(v)) for k, v in kwargs.items() if k not in PLACES])
        specs = tuple(
            [
                TensorSpec(tuple(o.shape), o.dtype) if isinstance(o, torch.Tensor) else None
                for o in outs
            ]
        )
        self.nodes.append(Node(name, traits.op, own, named, specs, *self._origin()))
        for k, o in enumerate(outs):
            if isinstance(o, torch.Tensor):
                self._refs[id(o)] = Ref(name, k), o
                if not traits.writes:
                    self._seen[_memory(o)] += 1
        return out

    def _may_write(self, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call writes just what another would return, to a value that none else has."""
        if traits.returning is None or self._seen[_memory(args[0])] != 1:
            return False
        ref = self.ref(args[0])
        maker = next(n for n in reversed(self.nodes) if n.name == ref.node)
        if any(r.node in self.constants for r in maker.refs):  # what ran was a copy of them
            return False
        made = traits.returning(*args, **kwargs)
        return bool(made.shape == args[0].shape and made.dtype == args[0].dtype)

    def _value(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return self.ref(arg)
        if isinstance(arg, (list, tuple)):
            return tuple([self._value(a) for a in arg])
        return arg

    def _on_meta(
        self, func: Any, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a call on meta tensors. Real ones of a single number stay: calls may want it."""
        if traits.makes or "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        moved = {k: _all_meta(v) for k, v in kwargs.items()}
        return self._forms.run(func, tuple(map(_all_meta, args)), moved)


@dataclass(frozen=True, slots=True)
class _Traits:
    """What tracing has to know of an op."""

    op: str
    short: str
    writes: bool
    makes: bool  # a tensor of none
    returning: Any = None  # of an op that writes, the one that returns a new value, if there is one


@cache
def _traits(func: Any) -> _Traits:
    schema, short = func._schema, func.overloadpacket.__name__
    returning = _returning(func) if schema.is_mutable else None
    op = str(returning or func)
    name = short.removesuffix("_") if returning else short
    return _Traits(op, name, schema.is_mutable, makes_tensor(op), returning)


def _returning(func: Any) -> Any:
    """The op that returns what one writes to its first argument alone; None where there is none."""
    schema, short = func._schema, func.overloadpacket.__name__
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    packet = getattr(getattr(torch.ops, func.namespace), short.removesuffix("_"), None)
    if written != [True] + [False] * (len(written) - 1) or not short.endswith("_"):
        return None
    known = packet is not None and func._overloadname in packet.overloads()
    return getattr(packet, func._overloadname) if known else None


def _all_meta(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.to("meta") if arg.dim() and not arg.is_meta else arg
    return [_all_meta(a) for a in arg] if isinstance(arg, (list, tuple)) else arg


def _memory(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)

"""What Python asks of values while a forward is recorded, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from merakc.frontend.aliases import spec_of
from merakc.frontend.builder import GraphBuilder
from merakc.frontend.calls import ragged
from merakc.frontend.calls.writes import written
from merakc.frontend.checks import asks_whether_finite, harmless_answer
from merakc.frontend.finite import FiniteGuards
from merakc.frontend.opaque import UntraceableError
from merakc.frontend.source import called_by_a_library, user_line
from merakc.frontend.values.reads import ValuesNeededError
from merakc.frontend.values.symbols import SYMBOLIC, Answer, Number, is_symbolic, number
from merakc.ir.graph import Ref

# Calls that count, and those that a count passes on its way to Python.
COUNTS = ("aten.sum.default", "aten.count_nonzero.default")
RESHAPE = "aten.reshape.default"
PASSING = frozenset(
    {"aten.to.dtype", "aten.reshape.default", "aten.detach.default", "aten.clone.default",
     "aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.clamp.default",
     "aten.clamp_min.default"}
)  # fmt: skip
DATA_FLOW = "the model's control flow depends on the data"
NO_DATA_FLOW = (
    "merakc compiles one graph for all batches: compute the value from shapes, or use torch.where"
)

UNDRAWN = "numbers are drawn for shapes that all batches share: set dropout=0, or pad and mask"
NO_PART = (
    "in-place write to a tensor that is no part of the model",
    "make it a buffer: of other tensors merakc takes the value as it is now",
)


class SymbolsNeededError(Exception):
    """A forward asks for what depends on values, and is to be recorded with symbols."""


class Asking(GraphBuilder, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A graph that is written as calls pass, and what stands behind the numbers that Python reads.

    With `symbolic`, numbers and sizes that depend on values are symbols. With `settling`, sizes
    that the batch alone says are numbers wherever parameters are computed with.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, told: Sequence[Answer], *, settling: bool = False
    ) -> None:
        GraphBuilder.__init__(self, fake_mode)
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self.told = told
        self.guards = FiniteGuards(self.nodes)
        self.items: dict[str, torch.Tensor] = {}  # what numbers were read of
        self.symbolic = fake_mode.shape_env is not None
        self.settling, self.paused = settling, False

    def _untraceable(self, what: str, remedy: str) -> UntraceableError:
        text = str(self._error(what, remedy))
        return UntraceableError(text, self.modules, user_line(), what)

    def _truth(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of one number is true, which Python wants to know."""
        ref = self._ref(tensor)
        if not self.reader.is_known(ref) and harmless_answer() is None:
            error = self._untraceable(DATA_FLOW, NO_DATA_FLOW)
            found = self.guards.answer(ref, error, user_line())
            if found is not None:
                return found
        return bool(self.answer(Number(sympy.Ne(self._number_of(tensor).expression, 0))))

    def _told(self, number: Number) -> Answer:
        """What the batch says, or is said to."""
        asked = len(self.reader.asked)
        try:
            return self.reader.number(number)
        except ValuesNeededError:
            if asked >= len(self.told):
                raise
            return self.told[asked]

    def _number_of(self, tensor: torch.Tensor) -> Number:
        """The number that a tensor holds."""
        symbol = sympy.Symbol(f"read{len(self.sources)}", integer=True)
        self.sources[symbol.name] = self._ref(tensor), None
        return Number(symbol)

    def _is_structure(self, tensor: torch.Tensor) -> bool:
        """Whether an integer of the batch is one of its elements, or the largest of them: a length
        or a place, with which Python will do more than arithmetic. What counts samples or tokens
        is not: it is another one in each batch, and is kept as a symbol.
        """
        ref = self._ref(tensor)
        if tensor.dtype.is_floating_point or not self.reader.is_known(ref):
            return False
        return self.reader.maker(ref, PASSING) not in COUNTS

    def answer(self, number: Number) -> Answer:
        """A number that Python wants to know, if the batch alone says it."""
        fine = harmless_answer() if number.is_truth else None
        if fine is not None:
            return fine
        if self.reader.knows(self._own(number)):
            if not self.symbolic:
                raise SymbolsNeededError
            return self.reader.log(number, self._told(number), user_line())
        error = self._untraceable(DATA_FLOW, NO_DATA_FLOW)
        if number.expression.is_Symbol and asks_whether_finite():
            made = {n.name: n for n in self.nodes}
            source, _ = self.sources[number.symbols[0]]
            self.guards.assume(made[source.node].refs, error, user_line())
            return 0.0
        raise error

    def _numpy(self, tensor: FakeTensor, *, force: bool = False) -> Any:
        """What numpy computes with, if it is whole numbers that the batch alone says."""
        if tensor.dtype.is_floating_point or not self.reader.is_known(self._ref(tensor)):
            raise self._untraceable(DATA_FLOW, NO_DATA_FLOW)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return np.array(tensor.tolist(), dtype=dtype)

    def _ragged(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call on sequences of several lengths."""
        if not self.symbolic:
            raise SymbolsNeededError
        if name in ragged.RECURRENTS and args[5] > 1 and args[6] > 0.0 and args[7]:
            raise self._error("dropout between layers over packed sequences", UNDRAWN)

        def emit(op: str, given: tuple[Any, ...], outs: tuple[torch.Tensor, ...]) -> None:
            ref = self._emit(op, self._args(given), {}, outs)
            for index, out in enumerate(outs):
                self.aliases.add(out, Ref(ref.node, index))
            self._name_sizes(outs, ref)

        with self.fake_mode:
            return ragged.RULES[name](emit, self._first, *args, **kwargs)

    def _first(self, sizes: torch.Tensor) -> int:
        """The first of the numbers of a tensor, which Python wants to know."""
        with self:
            return int(sizes[0])

    def _settled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a call: sizes that the batch alone says in numbers, numbers that are
        added or multiplied as tensors.
        """

        def settled(value: Any, kind: str) -> Any:
            if isinstance(value, (list, tuple)):
                return [settled(v, kind) for v in value]
            if isinstance(value, SYMBOLIC) and kind == "Tensor" and others:
                return self._as_tensor(value, others[0])
            if (
                isinstance(value, torch.SymInt)
                and "int" in kind
                and isinstance(found := number(value), Number)
                and self.reader.knows(found)
                and (self.settling or not found.expression.free_symbols <= sizes)
            ):
                return int(value)
            return value

        if self.settling and str(func) == "aten.index.Tensor" and not self._is_known(args[0]):
            args = self._places(*args)
        if not is_symbolic((args, kwargs)):
            return args, kwargs
        if str(func) == "aten.unbind.int" and is_symbolic(args[0].shape[(*args, 0)[1]]):
            with self:  # one by one: the size is wanted
                args = (args[0].reshape([int(size) for size in args[0].shape]), *args[1:])
        leaves = pytree.tree_leaves((args, kwargs))
        if self.settling and not all(map(self._is_known, leaves)):
            kept = [id(t) for t in pytree.tree_leaves(written(func, args, kwargs))]
            args, kwargs = pytree.tree_map(
                lambda x: x if id(x) in kept else self._with_sizes(x), (args, kwargs)
            )
        kinds = {a.name: str(a.type) for a in func._schema.arguments}
        others = [a for a in args if isinstance(a, torch.Tensor)]
        own = (number(size) for a in others for size in a.shape)
        sizes = {s for n in own if isinstance(n, Number) for s in n.expression.free_symbols}
        if str(func).startswith("aten.arange"):
            kinds = dict.fromkeys(kinds, "int")
        given = [settled(a, k) for a, k in zip(args, kinds.values(), strict=False)]
        return tuple(given), {n: settled(v, kinds[n]) for n, v in kwargs.items()}

    def _is_known(self, value: Any) -> bool:
        """Whether nothing but the batch stands before an argument."""
        return not isinstance(value, torch.Tensor) or self.reader.is_known(self._ref(value))

    def _text(self, tensor: torch.Tensor, *_: Any) -> str:
        """Refuses to write a tensor out: a forward may go by what stands there. Libraries do it for
        messages, of checks that hold.
        """
        if self.paused or called_by_a_library():
            return object.__repr__(tensor)
        raise self._error("a tensor is made a text", "write its shape, or single values: x.item()")

    def _known_tensor(self, value: Any) -> torch.Tensor | None:
        """A tensor, or a symbol as one, if nothing but the batch stands before it."""
        if isinstance(value, torch.Tensor):
            return value if self._is_known(value) else None
        if not self.reader.knows(number(value)):
            return None
        with self.fake_mode:
            found = torch.empty((), dtype=torch.float64)
        self.aliases.add(found, self._tensor_of(value))
        return found

    def _with_sizes(self, value: Any) -> Any:
        """A tensor whose shape the batch alone says, with numbers in it."""
        if not isinstance(value, torch.Tensor) or not is_symbolic(value):
            return value
        if not self._is_known(value):
            return value
        with self:
            sizes = tuple(int(size) for size in value.shape)
        with self.fake_mode:
            found = torch.empty(sizes, dtype=value.dtype)
        ref = self._ref(value)
        self.aliases.add(found, self._add(RESHAPE, (ref, sizes), {}, (spec_of(found),)))
        return found

    def _places(self, x: torch.Tensor, indices: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of a selection by masks, with the places in which they are true."""
        found: list[Any] = []
        for index in indices:
            mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            if mask and self._is_known(index):
                with self:
                    found += self._with_sizes(index.nonzero()).unbind(1)
            else:
                found.append(index)
        return x, found

    def _snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor of one number is now, of which no gradient is known."""
        with self.fake_mode:
            found = torch.empty((), dtype=tensor.dtype)
        whole = self._emit("aten.detach.default", (self._ref(tensor),), {}, (tensor,))
        self.aliases.add(found, self._add(RESHAPE, (whole, ()), {}, (spec_of(found),)))
        return found

    def _as_tensor(self, value: Any, other: torch.Tensor) -> torch.Tensor:
        """A number in arithmetic with a tensor, as a tensor that gives the same."""
        found = self.items.get(str(value))
        if found is None:
            ref = self._tensor_of(value)
            with self.fake_mode:
                found = torch.empty((), dtype=self.nodes[-1].spec.dtype)
            self.aliases.add(found, ref)
        scalar = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}[type(value)]
        wanted = torch.result_type(other, scalar)
        with self:
            return found if torch.result_type(other, found) == wanted else found.to(wanted)

    def _name_sizes(self, outs: Sequence[Any], ref: Ref) -> None:
        """Notes what the symbols in the shapes of a node's results that are new stand for."""
        for index, item in enumerate(outs):
            for dim, size in enumerate(item.shape if is_symbolic(item) else ()):
                if isinstance(found := number(size), Number) and found.expression.is_Symbol:
                    self._name_symbols(found.expression, Ref(ref.node, index), dim)

    def _name_symbols(self, expression: sympy.Basic, ref: Ref, dim: int | None = None) -> None:
        """Notes what the symbols of a number that is new stand for."""
        for symbol in expression.free_symbols:
            self.sources.setdefault(str(symbol), (ref, dim))

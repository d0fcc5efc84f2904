"""A graph while it is written: its inputs, its nodes, and the tensors that stand for its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from merakc.batches.split import path_name
from merakc.errors import RecordError
from merakc.frontend.aliases import Alias, Aliases, Storage, spec_of
from merakc.frontend.contexts import Slot
from merakc.frontend.python.content import tensors_in
from merakc.frontend.python.plain_tensors import call_reason, layout_reason
from merakc.frontend.python.views import View, Views
from merakc.frontend.regions import with_regions
from merakc.frontend.source import user_line
from merakc.frontend.values.absent import Absent
from merakc.frontend.values.idle import Skip
from merakc.frontend.values.reads import Reader
from merakc.frontend.values.results import PLAIN, find_loss
from merakc.frontend.values.structures import open_dataclasses
from merakc.frontend.values.symbols import SYMBOLIC, Number, number
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec

# Of most of a call's arguments that are no tensors.
_AS_THEY_ARE = frozenset((int, float, bool, str, type(None), torch.dtype))


class GraphBuilder:
    """Inputs, nodes and outputs so far; which tensor of the recording is which value."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.fake_mode = fake_mode
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []
        self.constants: dict[str, torch.Tensor] = {}
        # Custom functions' calls: how they are named, their arguments, and the leaves of these.
        self.checkpoints = False  # whether the forward asks torch to recompute some of it
        self.asks = ""  # the line that asks whether a value requires a gradient, which it does
        self.applied: list[tuple[str, Any, list[int]]] = []
        self.functions: dict[str, Callable[..., Any]] = {}
        self.aliases = Aliases(lambda op, args, spec: self._add(op, args, {}, (spec,)))
        self.states: list[tuple[Slot, Alias]] = []
        self.views = Views()  # of parameters and buffers, that Python holds
        self.modules: list[str] = []
        self.names: dict[str, int] = {}
        self.grads: set[Ref] = set()  # values that require a gradient
        self.batch: dict[str, torch.Tensor] = {}  # its tensors, by name
        self.checked: list[tuple[Ref, bool, str]] = []  # truths, what they have to be, the lines
        self.printed: list[str] = []  # that it prints
        self.numbers: set[str] = set()  # the outputs that are numbers in Python
        self.sources: dict[str, tuple[Ref, int | None]] = {}  # of the symbols
        self.reader = Reader(self.inputs, self.nodes, self.constants, self.sources)
        self.leaves: set[Ref] = set()  # of these, what a forward made its own leaves
        # Fake tensors that an earlier forward left behind, by their ids, and those that were read.
        self.leftovers: dict[int, torch.Tensor] = {}
        self.read_leftovers: set[int] = set()
        self.was_constant: Callable[[torch.Tensor], bool] = lambda _: False

    # ------------------------------------------------------------------ inputs and outputs

    def state_input(self, slot: Slot) -> None:
        """A parameter or buffer of the model."""
        kind = InputKind.PARAMETER if slot.is_parameter else InputKind.BUFFER
        storage = Storage(target=slot.name, is_parameter=slot.is_parameter)
        ref = self._input(slot.name, kind, slot.fake, slot.name, slot.fake.requires_grad)
        self.states.append((slot, self.aliases.add(slot.fake, ref, storage)))

    def batch_input(self, path: Any, leaf: Any) -> Any:
        """A leaf of the batch: tensors become inputs, other values stay as they are."""
        target = path_name(path)
        if not isinstance(leaf, torch.Tensor):
            if isinstance(leaf, np.ndarray) or any(True for _ in tensors_in(leaf)):
                raise RecordError(
                    f"'{target}' of the batch is of type {type(leaf).__name__}, which cannot be "
                    "split into micro-batches; give tensors, in dicts, sequences or dataclasses "
                    "(torch.utils._pytree.register_pytree_node makes others known)"
                )
            return leaf
        if leaf.requires_grad and torch.is_grad_enabled():
            raise RecordError(
                f"tensor '{target}' of the batch requires a gradient, and merakc gives gradients "
                "to parameters only; detach it, or make what computes it a part of the model"
            )
        with self.fake_mode:
            fake = torch.empty(leaf.shape, dtype=leaf.dtype)
        ref = self._input(target, InputKind.BATCH, fake, target, False)
        self.aliases.add(fake, ref)
        self.batch[target] = fake
        if not leaf.is_meta and not isinstance(leaf, FakeTensor):
            self.reader.given[ref] = leaf.detach()
        return fake

    def finish(self, out: Any) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
        """Makes the tensors of `out` and the written buffers outputs of the graph."""
        open_dataclasses(out)
        leaves, structure = pytree.tree_flatten_with_path(out)
        grads = self.grads if torch.is_grad_enabled() else self._grads_if_enabled()
        loss = find_loss(out, lambda x: self._ref(x) in grads)
        if loss is not None and loss.dtype.itemsize == 1:
            raise RecordError(
                f"the forward returns its loss as {loss.dtype}, in which losses of parts cannot be "
                "added up; return it as float32"
            )
        names: list[Any] = []
        for path, leaf in leaves:
            name = pytree.keystr(path).strip("[]'.") or "output"
            if not isinstance(leaf, (torch.Tensor, *SYMBOLIC)):
                is_plain = leaf is None or isinstance(leaf, PLAIN)
                names.append(leaf if is_plain else Absent(name, type(leaf).__name__))
                continue
            if not isinstance(leaf, torch.Tensor):
                self.numbers.add(name)
                self.outputs.append(Output(name, OutputKind.RESULT, self._tensor_of(leaf)))
                names.append(name)
                continue
            kind = OutputKind.LOSS if leaf is loss else OutputKind.RESULT
            loss = None if leaf is loss else loss  # returned twice, it is still one loss
            self.outputs.append(Output(name, kind, self._ref(leaf)))
            names.append(name)
        for slot, alias in self.states:
            ref = self._state(slot, alias)
            if ref is not None:
                self.outputs.append(Output(slot.name, OutputKind.BUFFER, ref))
        return tuple(names), structure

    def _tensor_of(self, leaf: Any) -> Ref:
        """A number that the forward returns, as a tensor."""
        kinds = {
            torch.SymInt: torch.int64,
            torch.SymFloat: torch.float64,
            torch.SymBool: torch.bool,
        }
        spec = TensorSpec((), kinds[type(leaf)])
        return self._add(
            "aten.scalar_tensor.default", (self._args(leaf),), {"dtype": spec.dtype}, (spec,)
        )

    def _grads_if_enabled(self) -> set[Ref]:
        """The values that require a gradient where gradients are not switched off, as in eval."""
        found = {Ref(i.name) for i in self.inputs if i.requires_grad}
        for node in self.nodes:
            found.update(replace(node, grad=True).grad_outputs(found))
        return found

    def _state(self, slot: Slot, alias: Alias) -> Ref | None:
        """The new value of a buffer that the forward wrote or replaced."""
        now = slot.states.get(slot.key)
        if now is slot.fake:
            return self.aliases.ref(alias) if alias.storage.written else None
        if slot.is_parameter or not isinstance(now, torch.Tensor) or spec_of(now) != alias.spec:
            raise RecordError(
                f"the forward puts something else in the place of '{slot.name}' ({alias.spec}); "
                "merakc keeps the new value of a buffer, of the same shape and dtype"
            )
        return self._ref(now)

    def graph(self) -> Graph:
        """What was recorded, in regions where shapes depend on values; parameters and buffers that
        nothing reads are left out.
        """
        read = {r.node for n in self.nodes for r in n.refs} | {o.ref.node for o in self.outputs}
        kept = tuple(i for i in self.inputs if i.name in read)
        constants = {name: value.detach().clone() for name, value in self.constants.items()}
        graph = Graph(kept, tuple(self.nodes), tuple(self.outputs), constants, self.functions)
        return with_regions(graph, self.sources, len(self.functions), self.skips())

    def skips(self) -> Sequence[Skip]:
        """What turns of loops over what was hit leave out where they were not."""
        return ()

    # ------------------------------------------------------------------ pieces of a node

    def _error(self, what: str, remedy: str) -> RecordError:
        module = self.modules[-1] if self.modules else ""
        return RecordError(f"{user_line()}: {what}, in module '{module}'; {remedy}")

    def _owner(self, tensor: torch.Tensor) -> str:
        """Which parameter or buffer a tensor is, for a message."""
        alias = self.aliases.find(tensor)
        return f", '{alias.storage.target}'" if alias and alias.storage.target else ""

    def _input(
        self, name: str, kind: InputKind, fake: torch.Tensor, target: str, grad: bool
    ) -> Ref:
        ref = Ref(self._unique(name))
        spec = TensorSpec(tuple(fake.shape), fake.dtype)
        self.inputs.append(Input(ref.node, kind, spec, target, grad))
        if grad:
            self.grads.add(ref)
        return ref

    def _unique(self, name: str) -> str:
        count = self.names.get(name, -1) + 1
        self.names[name] = count
        return name if count == 0 else self._unique(f"{name}_{count}")

    def _ref(self, tensor: torch.Tensor) -> Ref:
        alias = self.aliases.find(tensor)
        if alias is not None:
            return self.aliases.ref(alias)
        if isinstance(tensor, FakeTensor):
            self._read_leftover(tensor)
        elif (view := self.views.of(tensor)) is not None:
            shown = self._viewed(view, tensor)
            self.aliases.share(tensor, self._alias(shown))
            return self._ref(shown)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise self._error(
                f"a tensor of shape {tuple(tensor.shape)} that requires a gradient is no parameter "
                "of the model",
                "register it (nn.Parameter, nn.ParameterList), or detach it",
            )
        self._check_layout(tensor)
        ref = self._input("constant", InputKind.CONSTANT, tensor, "", False)
        self.constants[ref.node] = tensor
        self.aliases.add(tensor, ref, Storage(outside=True))
        return ref

    def _viewed(self, view: View, tensor: torch.Tensor) -> torch.Tensor:
        """A view of a parameter or buffer, as it is in this recording."""
        (base,) = [slot.fake for slot, _ in self.states if slot.name == view.of]
        if view.itself:
            return base
        if tensor.dtype != base.dtype:
            raise self._error(
                f"a tensor is read that lies in the memory of '{view.of}' as {tensor.dtype}",
                "make it of that in the forward",
            )
        if base.stride() != view.strides:
            raise self._error(
                f"a tensor is read that is a view of '{view.of}', whose elements do not lie close "
                "together",
                f"make '{view.of}' contiguous(), or the view in the forward",
            )
        if base.requires_grad:
            whole, base, detached = base, base.detach(), "aten.detach.default"
            ref = self._emit(detached, (self._ref(whole),), {}, (base,))
            self.aliases.add_view(base, ref, self._alias(whole), detached, ())
        first = int(base.storage_offset()) + view.first
        return self._strided(base, tensor.shape, tensor.stride(), first)

    def _read_leftover(self, tensor: torch.Tensor) -> None:
        """A tensor that no call of this forward made."""
        if id(tensor) not in self.leftovers and not self.was_constant(tensor):
            raise self._error(
                f"a tensor of shape {tuple(tensor.shape)} is read that was made in another "
                "recording and kept outside the model (by functools.lru_cache, in a global)",
                "make it in the forward, or a buffer",
            )
        self.read_leftovers.add(id(tensor))

    def _args(self, value: Any) -> Any:
        if type(value) in _AS_THEY_ARE:
            return value
        if isinstance(value, torch.Tensor):
            return self._ref(value)
        if isinstance(value, (tuple, list)):
            return tuple([self._args(v) for v in value])
        if isinstance(value, dict):
            return {k: self._args(v) for k, v in value.items()}
        found = number(value)
        return self._own(found) if isinstance(found, Number) else found

    def _own(self, found: Number) -> Number:
        """A number of this forward's own, or an error."""
        if all(symbol in self.sources for symbol in found.symbols):
            return found
        raise self._error(
            "a number is used that another forward has read of its tensors and left behind (in an "
            "attribute of the model, in a list, in a global), which no compiled step knows",
            "make it a buffer, to which the forward writes tensors: no .item(), no float()",
        )

    def _check_layout(self, tensor: torch.Tensor, arguments: Iterable[Any] = ()) -> None:
        for reason, remedy in (layout_reason(tensor), call_reason(arguments)):
            if reason:
                raise self._untraceable(f"a tensor of shape {tuple(tensor.shape)} {reason}", remedy)

    def _strided(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        raise NotImplementedError

    def _untraceable(self, what: str, remedy: str) -> RecordError:
        raise NotImplementedError

    def _emit(self, op: str, args: Any, kwargs: dict[str, Any], outs: Sequence[Any]) -> Ref:
        for out in outs:
            if isinstance(out, torch.Tensor):
                self._check_layout(out, (*args, *kwargs.values()))
        specs = tuple(spec_of(o) if isinstance(o, torch.Tensor) else None for o in outs)
        return self._add(op, args, kwargs, specs)

    def _add(
        self, op: str, args: Any, kwargs: dict[str, Any], specs: tuple[TensorSpec | None, ...]
    ) -> Ref:
        node = Node(
            self._unique(op.split(".")[1]), op, args, tuple(kwargs.items()), specs,
            module=self.modules[-1] if self.modules else "", source=user_line(),
            grad=torch.is_grad_enabled(),
        )  # fmt: skip
        self.nodes.append(node)
        self.grads.update(node.grad_outputs(self.grads))
        return Ref(node.name)

    def _alias(self, tensor: torch.Tensor) -> Alias:
        self._ref(tensor)
        alias = self.aliases.find(tensor)
        assert alias is not None
        return alias

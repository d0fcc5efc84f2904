"""The mode that writes a graph: a `TorchDispatchMode` below autograd.

There every call is one ATen op, and composite ops (linear, attention, cross-entropy) are whole,
whatever Python API the model called them by.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from merakc.batches import path_name
from merakc.errors import RecordError
from merakc.frontend import normalise
from merakc.frontend.aliases import Alias, Aliases, Storage, spec_of
from merakc.frontend.contexts import Slot, exporting, function_calls, module_names
from merakc.frontend.results import find_loss
from merakc.frontend.source import user_line
from merakc.frontend.writes import REVIEWS, functional, without_out, written
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.kernels import attention, dropout  # noqa: F401  registers the two ops

# Calls whose answer is known where the tensor was made outside the forward.
CONSTANT_VALUES = ("aten._local_scalar_dense.default", "aten.equal.default")
RECORDING_NOTE = (
    "merakc was recording the model's forward: on tensors without data, and without autograd's "
    "history (requires_grad is False, autograd.grad and tensor hooks do not work)"
)
# Calls that only ask about a tensor.
QUESTIONS = ("prim.device.default", "aten.is_same_size.default", "aten._has_compatible_shallow_")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode that turns calls into nodes."""

    supports_higher_order_operators = True  # to refuse them by name

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = fake_mode
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.functions: dict[str, functools.partial[Any]] = {}
        self.aliases = Aliases(lambda op, args, spec: self._add(op, args, {}, (spec,)))
        self.states: list[tuple[Slot, Alias]] = []
        self.modules: list[str] = []
        self.paused = False
        self.names: dict[str, int] = {}
        self.grads: set[Ref] = set()  # values that require a gradient
        self.seed: Ref | None = None
        self.dropouts = 0

    # ------------------------------------------------------------------ inputs and outputs

    def state_input(self, slot: Slot) -> None:
        """A parameter or buffer of the model."""
        kind = InputKind.PARAMETER if slot.is_parameter else InputKind.BUFFER
        storage = Storage(target=slot.name, is_parameter=slot.is_parameter)
        ref = self._input(slot.name, kind, slot.fake, slot.name, slot.fake.requires_grad)
        self.states.append((slot, self.aliases.add(slot.fake, ref, storage)))

    def batch_input(self, path: Any, leaf: Any) -> Any:
        """A leaf of the batch: tensors become inputs, other values stay as they are."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        target = path_name(path)
        if leaf.requires_grad and torch.is_grad_enabled():
            raise RecordError(
                f"tensor '{target}' of the batch requires a gradient, and merakc gives gradients "
                "to parameters only; detach it, or make what computes it a part of the model"
            )
        with self.fake_mode:
            fake = torch.empty(leaf.shape, dtype=leaf.dtype)
        self.aliases.add(fake, self._input(target, InputKind.BATCH, fake, target, False))
        return fake

    def finish(self, out: Any) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
        """Makes the tensors of `out` and the written buffers outputs of the graph."""
        leaves, structure = pytree.tree_flatten_with_path(out)
        loss = find_loss(out)
        names: list[Any] = []
        for path, leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                names.append(leaf)
                continue
            name = pytree.keystr(path).strip("[]'.") or "output"
            kind = OutputKind.LOSS if leaf is loss else OutputKind.RESULT
            loss = None if leaf is loss else loss  # returned twice, it is still one loss
            self.outputs.append(Output(name, kind, self._ref(leaf)))
            names.append(name)
        for slot, alias in self.states:
            ref = self._state(slot, alias)
            if ref is not None:
                self.outputs.append(Output(slot.name, OutputKind.BUFFER, ref))
        return tuple(names), structure

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
        """What was recorded; parameters and buffers that nothing reads are left out."""
        read = {r.node for n in self.nodes for r in n.refs} | {o.ref.node for o in self.outputs}
        kept = tuple(i for i in self.inputs if i.name in read)
        constants = {name: value.detach().clone() for name, value in self.constants.items()}
        return Graph(kept, tuple(self.nodes), tuple(self.outputs), constants, self.functions)

    @contextlib.contextmanager
    def running(self, model: torch.nn.Module) -> Iterator[None]:
        """Everything that has to hold while the model's forward runs."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(module_names(model, self.modules))
            stack.enter_context(exporting())
            stack.enter_context(function_calls(self._function))
            stack.enter_context(torch._C._AutoDispatchBelowAutograd())
            stack.enter_context(self.fake_mode)
            stack.enter_context(self)
            try:
                yield
            except Exception as error:
                error.add_note(RECORDING_NOTE)
                raise

    # ------------------------------------------------------------------ calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._dispatch(func, args, kwargs or {})
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self._error(
                f"the model's control flow depends on the data ({error})",
                "merakc compiles one graph for all batches: compute the value from shapes, or use "
                "torch.where",
            ) from error
        except UnsupportedOperatorException as error:
            raise self._error(f"no shape rule for {error}", "give the op a fake kernel") from error

    def _error(self, what: str, remedy: str) -> RecordError:
        module = self.modules[-1] if self.modules else ""
        return RecordError(f"{user_line()}: {what}, in module '{module}'; {remedy}")

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = str(func)
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise self._error(
                f"higher-order op {name}", "merakc records plain ops: torch.where, or attention "
                "by scaled_dot_product_attention",
            )  # fmt: skip
        if name in CONSTANT_VALUES and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if self.paused or name in QUESTIONS:
            return func(*args, **kwargs)
        reason = normalise.refused(name, args)
        if reason:
            raise self._error(*reason)
        if name == "aten.scaled_dot_product_attention.default":
            return self._attention(*args, **kwargs)
        if name == "aten.dropout.default":
            return self._dropout(*args, **kwargs)
        if name == "aten.dropout_.default":
            with self:
                return args[0].copy_(torch.dropout(*args, **kwargs))
        if name == "aten.batch_norm.default":
            with self:
                return normalise.batch_norm(self._batch_norm, *args, **kwargs)
        if normalise.decomposes(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._call(func, args, kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        mask_grad = mask is not None and self._ref(mask) in self.grads

        def emit(*inner: Any) -> torch.Tensor:
            out: torch.Tensor = torch.ops.merakc.attention(*inner)[0]
            return out

        with self:
            return normalise.attention(emit, mask_grad, *args, **kwargs)

    def _dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not train or p == 0.0:
            return x
        if self.seed is None:
            with self.fake_mode:
                seed = torch.empty((), dtype=torch.int64)
            self.seed = self._input("seed", InputKind.SCALAR, seed, "seed", False)
        self.dropouts += 1
        out = x.new_empty(x.shape)
        sizes = tuple(x.shape)
        starts = (0,) * len(sizes)
        args = (self._ref(x), self.seed, p, self.dropouts, sizes, starts, sizes)
        self.aliases.add(out, self._emit("merakc.dropout.default", args, {}, (out,)))
        return out

    def _batch_norm(self, *args: Any) -> torch.Tensor:
        out: torch.Tensor = self._call(torch.ops.aten.batch_norm.default, args, {})
        return out

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a call on the fake tensors and writes its node."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self._error(f"random op {func}", normalise.NO_RANDOM)
        targets = pytree.tree_leaves(written(func, args, kwargs))
        if any(not isinstance(t, FakeTensor) for t in targets):
            raise self._error(
                f"in-place call {func} on a tensor that is no part of the model",
                "make it a buffer: of other tensors merakc takes the value as it is now",
            )
        self.paused, before = True, self.paused
        try:
            out = func(*args, **kwargs)
        finally:
            self.paused = before
        if targets:
            self._write(func, args, kwargs, targets)
            return out
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        if not any(isinstance(o, torch.Tensor) for o in outs):
            return out
        if all(any(o is t for t in tensors) for o in outs):
            return out
        name = normalise.RENAMED.get(str(func), str(func))
        if name.startswith("aten.lift_fresh"):
            self.aliases.add(out, self._ref(args[0]))
            return out
        if name == "aten.detach.default" and self._ref(args[0]) not in self.grads:
            self.aliases.share(out, self._alias(args[0]))
            return out
        ref = self._emit(
            name, self._args(tuple(args)), self._args(normalise.device_free(kwargs)), outs
        )
        self._bind(name, ref, outs, tensors, args)
        return out

    def _function(self, cls: Any, original: Any, args: Any, kwargs: Any) -> Any:
        """A custom `autograd.Function`: one node, which keeps its own backward."""
        if self.paused or kwargs:
            return original(cls, *args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            # It needs an input with a gradient; without one, eager gives its parameters none.
            inputs = [a for a in args if isinstance(a, torch.Tensor)]
            with torch.set_grad_enabled(any(self._ref(a) in self.grads for a in inputs)):
                return args[0](*args[2:])
        self.paused = True
        try:
            out = original(cls, *args)
        finally:
            self.paused = False
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        ref = self._emit(
            self._function_name(functools.partial(original, cls)), self._args(args), {}, outs
        )
        for index, item in enumerate(outs):
            if isinstance(item, torch.Tensor):
                self.aliases.add(item, Ref(ref.node, index))
        return out

    def _function_name(self, apply: functools.partial[Any]) -> str:
        """The op name of a custom function; classes of one name are numbered."""
        (cls,) = apply.args
        base = name = f"function.{cls.__name__}.{cls.__module__}"
        number = 1
        while self.functions.setdefault(name, apply).args != apply.args:
            number += 1
            name = f"{base}.{number}"
        return name

    def _bind(
        self, op: str, ref: Ref, outs: list[Any], tensors: list[torch.Tensor], args: Any
    ) -> None:
        """Names the outputs of a call, as views of the argument whose memory they share."""
        memory = {t.untyped_storage()._cdata: t for t in reversed(tensors)}
        for index, out in enumerate(outs):
            if not isinstance(out, torch.Tensor):
                continue
            here = Ref(ref.node, index)
            parent = memory.get(out.untyped_storage()._cdata)
            found = self.aliases.find(parent) if parent is not None else None
            if found is None:
                self.aliases.add(out, here)
            else:
                self.aliases.add_view(out, here, found, op, self._args(tuple(args[1:])))

    def _write(self, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> None:
        """An in-place call: its functional form, then the new values of the written tensors."""
        target, packet = targets[0], str(func).split(".")[1]
        pure = functional(func)
        if pure is None and packet != "copy_":
            raise self._error(f"in-place call {func}", "merakc knows no form without the write")
        if packet in REVIEWS:
            self.aliases.ref(self._alias(target))
            ref = self._emit(str(pure), self._args(tuple(args)), {}, (target,))
            self.aliases.review(target, ref, str(pure), self._args(tuple(args[1:])))
            return
        if packet == "copy_":
            ref = self._copied(args[1], target)
        else:
            given = self._args(without_out(func, kwargs))
            ref = self._emit(str(pure), self._args(tuple(args)), given, targets)
        for index, item in enumerate(targets):
            try:
                self.aliases.write(self._alias(item), Ref(ref.node, index), self.grads)
            except RecordError as error:
                raise RecordError(f"{user_line()}: {error}") from None

    def _alias(self, tensor: torch.Tensor) -> Alias:
        self._ref(tensor)
        alias = self.aliases.find(tensor)
        assert alias is not None
        return alias

    def _copied(self, source: Any, target: torch.Tensor) -> Ref:
        """`source` with the dtype and shape of `target`."""
        ref = self._ref(source)
        if source.dtype != target.dtype:
            cast = TensorSpec(tuple(source.shape), target.dtype)
            ref = self._add("aten.to.dtype", (ref, target.dtype), {}, (cast,))
        shape = tuple(target.shape)
        return self._emit("aten.expand.default", (ref, shape), {}, (target,))

    # ------------------------------------------------------------------ pieces of a node

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
        assert not isinstance(tensor, FakeTensor), "a tensor that no call made"
        ref = self._input("constant", InputKind.CONSTANT, tensor, "", False)
        self.constants[ref.node] = tensor
        self.aliases.add(tensor, ref)
        return ref

    def _args(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._ref(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._args(v) for v in value)
        if isinstance(value, dict):
            return {k: self._args(v) for k, v in value.items()}
        return value

    def _emit(self, op: str, args: Any, kwargs: dict[str, Any], outs: Sequence[Any]) -> Ref:
        specs = tuple(spec_of(o) if isinstance(o, torch.Tensor) else None for o in outs)
        return self._add(op, args, kwargs, specs)

    def _add(
        self, op: str, args: Any, kwargs: dict[str, Any], specs: tuple[TensorSpec | None, ...]
    ) -> Ref:
        node = Node(
            self._unique(op.split(".")[1]), op, args, tuple(kwargs.items()), specs,
            self.modules[-1] if self.modules else "", user_line(), torch.is_grad_enabled(),
        )  # fmt: skip
        self.nodes.append(node)
        self.grads.update(node.grad_outputs(self.grads))
        return Ref(node.name)

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
from torch.utils._python_dispatch import _disable_current_modes

from merakc.errors import ForwardError, MerakError, RecordError, failure
from merakc.frontend.aside import AsideRecorder
from merakc.frontend.asking import DATA_FLOW, NO_DATA_FLOW, NO_PART, UNDRAWN, SymbolsNeededError
from merakc.frontend.builtin_calls import symbolic_builtins
from merakc.frontend.calls import composites, normalise, ragged
from merakc.frontend.calls.around import same_flags, without_modes
from merakc.frontend.calls.bags import bags_in_rows
from merakc.frontend.calls.communication import (
    check_call,
    no_objects_sent,
    number_of_ranks_unknown,
)
from merakc.frontend.calls.draws import ASKED, Draws, drops_nothing, is_drawn
from merakc.frontend.calls.encoders import as_in_training
from merakc.frontend.calls.forms import (
    Forms,
    is_plain_fake,
    lifted,
    make_fake,
    memory_of,
    op_name,
    run_bare,
    tensors_of,
)
from merakc.frontend.calls.generators import DrawnError, GeneratorWatch, without_entropy
from merakc.frontend.calls.repeats import Repeats, Ways
from merakc.frontend.calls.strides import by_dims
from merakc.frontend.calls.writes import REVIEWS, functional, without_out, written
from merakc.frontend.contexts import exporting, fixed_dtypes, module_names, recordable
from merakc.frontend.functions import FunctionRecorder, function_calls
from merakc.frontend.history import HistoryRecorder
from merakc.frontend.hits.visits import Visiting
from merakc.frontend.replaced import replaced
from merakc.frontend.source import user_line
from merakc.frontend.values.made import recorded_tensors
from merakc.frontend.values.symbols import ITEM, SYMBOLIC, Answer, is_symbolic
from merakc.frontend.whole import WholeModules
from merakc.ir.graph import InputKind, Ref, TensorSpec
from merakc.kernels import attention, draws, experts  # noqa: F401  registers their ops

# Calls that ask for a tensor's truth; the second also for numbers.
TRUTHS = ("aten.is_nonzero.default", ITEM)
ASSERTS = ("aten._assert_async.", "aten._functional_assert_async.")
# Calls whose answer is known where the tensor was made outside the forward.
EQUAL = "aten.equal.default"
CONSTANT_VALUES = (ITEM, EQUAL)
# Calls that methods of the recorder write in another form.
WRITTEN_OTHERWISE = {
    "aten.batch_norm.default": "_batch_norm",
    "aten.as_strided.default": "_strided",
    "aten.scaled_dot_product_attention.default": "_attention",
    "aten.index_put.default": "_put",
    "aten.index_put_.default": "_put_",
    "aten.bincount.default": "_bincount",
}
# Calls that give what they are given: a tensor made of numbers, one without a history.
LIFTED, DETACHED = "aten.lift_fresh.default", "aten.detach_.default"
# Calls that only ask about a tensor.
DEVICE = torch.ops.prim.device.default
QUESTIONS = ("prim.device.default", "aten.is_same_size.default", "aten._has_compatible_shallow_")
# A check of a tensor's shape and dtype, which holds when it is recorded.
METADATA = "aten._assert_tensor_metadata.default"


class Recorder(WholeModules, Visiting, AsideRecorder, FunctionRecorder, HistoryRecorder):  # type: ignore[no-untyped-call]
    """The mode that turns calls into nodes.

    `watched` says whether each module is seen to draw, `exported` whether libraries are told that
    the model is exported; `told` is what Python is to be told that reads a batch without values.
    Modules that the forward makes are entered into `loose`.
    """

    supports_higher_order_operators = True  # to refuse them by name

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        *,
        watched: bool = False,
        exported: bool = False,
        settling: bool = False,
        told: Sequence[Answer] = (),
        loose: dict[str, type[torch.nn.Module]] | None = None,
    ) -> None:
        super().__init__(fake_mode, told, settling=settling)
        self.loose = {} if loose is None else loose
        self.watched, self.exported = watched, exported
        make = functools.partial(make_fake, fake_mode)
        bare = functools.partial(run_bare, fake_mode)
        at = functools.partial(memory_of, self.fake_mode)
        self.forms = Forms(make, is_plain_fake, views=True, bare=bare, memory=at)
        ways = Ways(self._args, self._call, self._add)
        self.repeats = Repeats(self.forms, self.aliases, self.nodes, ways)
        self.draws = Draws(self._error, self.inputs, self.nodes)
        self.opaques = 0
        self.default_dtype = torch.get_default_dtype()

    @contextlib.contextmanager
    def running(self, model: torch.nn.Module) -> Iterator[None]:
        """Everything that has to hold while the model's forward runs."""
        with contextlib.ExitStack() as stack:
            watch = GeneratorWatch()

            def passing() -> None:
                if self.paused or not self.watched:
                    return
                with _disable_current_modes():
                    watch.check(self.modules[-1], model)

            def found(name: str, module: torch.nn.Module) -> None:
                self.loose[name] = type(module)

            stack.enter_context(module_names(model, self.modules, passing, found))
            stack.enter_context(recordable(self._check_all))
            stack.enter_context(as_in_training())
            stack.enter_context(bags_in_rows())
            stack.enter_context(exporting() if self.exported else contextlib.nullcontext())
            stack.enter_context(fixed_dtypes())
            stack.enter_context(self.speaking())
            stack.enter_context(symbolic_builtins(self._known_tensor))
            stack.enter_context(without_entropy())
            stack.enter_context(without_modes())
            stack.enter_context(no_objects_sent())
            stack.enter_context(number_of_ranks_unknown())
            stack.enter_context(function_calls(self._function))
            stack.enter_context(recorded_tensors())
            stack.enter_context(self._answering())
            asked = {"numpy": self._numpy, "data_ptr": self._address}
            asked |= {"__repr__": self._text, "__format__": self._formatted}
            for name, of in {**asked, "__iter__": self._iterate}.items():
                stack.enter_context(
                    replaced(FakeTensor, name, lambda x, *y, of=of, **how: of(x, *y, **how))
                )
            stack.enter_context(torch._C._AutoDispatchBelowAutograd())
            stack.enter_context(same_flags())  # the dispatcher's, which that puts back, too
            stack.enter_context(self.fake_mode)
            stack.enter_context(self)
            try:
                yield
            except Exception as error:
                self._finish(watch)
                self.blame_loop(error)
                if isinstance(error, (MerakError, DrawnError, SymbolsNeededError)):
                    raise
                raise ForwardError(
                    f"the model's forward fails on the batch: {failure(error)}; mend it, or the "
                    "batch (recorded, tensors have no values)"
                ) from error
            self._finish(watch)

    def _finish(self, watch: GeneratorWatch) -> None:
        """Raises `DrawnError` where a forward that was not watched has drawn random numbers."""
        with _disable_current_modes():
            drawn = watch.drawn()  # of any, which are given back
        if drawn and not self.watched:
            raise DrawnError

    # ------------------------------------------------------------------ calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is DEVICE
            and type(args[0]) is FakeTensor
            and not self.fake_mode.in_kernel_invocation
        ):
            return args[0].fake_device
        try:
            made = NotImplemented if self.paused else self.repeats.run(func, args, kwargs or {})
            return self._dispatch(func, args, kwargs or {}) if made is NotImplemented else made
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if not self.symbolic:
                raise SymbolsNeededError from error
            raise self._untraceable(f"{DATA_FLOW} ({error})", NO_DATA_FLOW) from error
        except UnsupportedOperatorException as error:
            remedy = "give the op a fake kernel"
            raise self._untraceable(f"no shape rule for {error}", remedy) from error

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = op_name(func)
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise self._error(
                f"higher-order op {name}", "merakc records plain ops: torch.where, or attention "
                "by scaled_dot_product_attention",
            )  # fmt: skip
        check_call(func)
        if name in CONSTANT_VALUES and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if self.paused or name in QUESTIONS:
            return func(*args, **kwargs)
        if name in ASKED or name in TRUTHS:
            outcome = self.draws.answer(name, self._args(tuple(args)))
            if outcome is not None:
                with unset_fake_temporarily():
                    return torch.full(args[0].shape, outcome)
        if name in TRUTHS and (name == TRUTHS[0] or args[0].dtype == torch.bool):
            answer = self._asked(args[0])
            if answer is not None:
                return answer
        if name.startswith(ASSERTS):
            return self.check(args[0], True)
        if name == EQUAL:
            return self._equal(*args)
        if name in ragged.RULES:
            return self._ragged(name, args, kwargs)
        if name == ITEM and isinstance(args[0], FakeTensor) and self._is_structure(args[0]):
            return self.answer(self._number_of(args[0]))
        if (parts := composites.part_by_part(name, args)) is not None:
            with self:
                return parts(*args, **kwargs)
        if self.symbolic:
            if (chosen := self._select(name, args, kwargs)) is not NotImplemented:
                return chosen
            args, kwargs = self._settled(func, args, kwargs)
        if reason := normalise.refused(name, args):
            raise self._error(*reason)
        if name in WRITTEN_OTHERWISE:
            return getattr(self, WRITTEN_OTHERWISE[name])(*args, **kwargs)
        if normalise.decomposes(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return (self._call if self.symbolic else self.repeats.first)(func, args, kwargs)

    def _address(self, *_: Any) -> int:
        raise self._error("the address of a tensor is read", "tell tensors apart by `is`")

    def _strided(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self:
            found = by_dims(x, *args, **kwargs)
        if found is None:
            raise self._untraceable(
                "as_strided of a tensor's memory, which a graph knows nothing of",
                "use unfold, views or indices",
            )
        return found

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        with self:
            return one.shape == other.shape and bool((one == other).all())

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        mask_grad = mask is not None and self._ref(mask) in self.grads

        def emit(*inner: Any) -> torch.Tensor:
            out: torch.Tensor = torch.ops.merakc.attention(*inner)[0]
            return out

        with self:
            return normalise.attention(emit, mask_grad, *args, **kwargs)

    def _batch_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = functools.partial(self._call, torch.ops.aten.batch_norm.default)
        with self:
            return normalise.batch_norm(lambda *given: call(given, {}), *args, **kwargs)

    def _scalar(self, name: str) -> torch.Tensor:
        """A number of the step, int64, that the runtime fills in."""
        with self.fake_mode:
            fake = torch.empty((), dtype=torch.int64)
        self.aliases.add(fake, self._input(name, InputKind.SCALAR, fake, name, False))
        return fake

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a call on the fake tensors and writes its node."""
        if is_drawn(func):
            if self.symbolic and is_symbolic((args, kwargs)) and not drops_nothing(func, args):
                raise self._error("random numbers of a shape that depends on the data", UNDRAWN)
            self.draws.prepare(self._scalar)
            with self:
                return self.draws.call(func, args, kwargs)
        targets = pytree.tree_leaves(found) if (found := written(func, args, kwargs)) else []
        if any(not isinstance(t, FakeTensor) or self._alias(t).storage.outside for t in targets):
            raise self._error(*NO_PART)
        name = normalise.recorded_name(func, args)
        if name == normalise.GROUPED:  # torch's knows no shapes for all dtypes
            func = torch.ops.merakc.grouped_mm.default
        out = self._out(name, func, args, kwargs)
        if targets:
            self._write(func, args, kwargs, targets)
            return out
        tensors = tensors_of((args, tuple(kwargs.values())))
        if tensors and not func._schema.returns and name != METADATA:
            raise self._untraceable(
                f"{name} gives nothing back: a check of values, or something outside of the graph",
                "check values by torch._assert_async, and return what is to be kept",
            )
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        if isinstance(out, SYMBOLIC):
            self._name_symbols(out.node.expr, self._add(ITEM, (self._ref(args[0]),), {}, (None,)))
            self.items[str(out)] = self._snapshot(args[0])
        if not any(isinstance(o, torch.Tensor) for o in outs):
            return out
        if all(any(o is t for t in tensors) for o in outs):
            return out
        if name.startswith("aten.lift_fresh"):
            self.aliases.add(out, self._ref(args[0]))
            return out
        if name == "aten.detach.default" and self._ref(args[0]) not in self.grads:
            self.aliases.share(out, self._alias(args[0]))
            return out
        if torch.get_default_dtype() != self.default_dtype:  # which holds when the graph is run
            kwargs = normalise.with_dtype(func, kwargs, outs[0])
        name, given, named = normalise.device_free(name, tuple(args), kwargs)
        ref = self._emit(name, self._args(given), self._args(named), outs)
        self._bind(name, ref, outs, tensors, args)
        self._name_sizes(outs, ref)
        return out

    def _out(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call on the fake tensors returns."""
        self.paused, before = True, self.paused
        try:
            if self.symbolic and is_symbolic((args, kwargs)):
                return func(*args, **kwargs)
            if name == DETACHED and isinstance(args[0], FakeTensor):
                return args[0]
            known = lifted(self.fake_mode, args[0]) if name == LIFTED else None
            return self.forms.run(func, args, kwargs) if known is None else known
        finally:
            self.paused = before

    def _bind(
        self, op: str, ref: Ref, outs: list[Any], tensors: list[torch.Tensor], args: Any
    ) -> None:
        """Names the outputs of a call, as views of the argument whose memory they share."""
        memory = {memory_of(self.fake_mode, t): t for t in reversed(tensors)}
        for index, out in enumerate(outs):
            if not isinstance(out, torch.Tensor):
                continue
            here = Ref(ref.node, index)
            parent = memory.get(out.untyped_storage()._cdata)
            found = self.aliases.find(parent) if parent is not None else None
            if found is None:
                self.aliases.add(out, here)
            elif len(outs) > 1 and is_symbolic(args[1:]):
                raise self._untraceable("pieces of sizes that the data says", NO_DATA_FLOW)
            else:
                self.aliases.add_view(out, here, found, op, self._args(tuple(args[1:])))

    def _write(self, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> None:
        """An in-place call: its functional form, then the new values of the written tensors."""
        target, packet = targets[0], str(func).split(".")[1]
        if packet == "zero_":
            func, args = torch.ops.aten.fill_.Scalar, (target, 0)
        pure = functional(func)
        if pure is None and packet != "copy_":
            raise self._error(f"in-place call {func}", "merakc knows no form without the write")
        if packet in REVIEWS:
            self.aliases.ref(self._alias(target))
            ref = self._emit(str(pure), self._args(tuple(args)), {}, (target,))
            before = self.aliases.known[id(target)]  # of what it now shows a view
            self.aliases.add_view(target, ref, before, str(pure), self._args(tuple(args[1:])))
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

    def _copied(self, source: Any, target: torch.Tensor) -> Ref:
        """`source` with the dtype and shape of `target`."""
        ref = self._ref(source)
        if source.dtype != target.dtype:
            cast = TensorSpec(tuple(source.shape), target.dtype)
            ref = self._add("aten.to.dtype", (ref, target.dtype), {}, (cast,))
        shape = tuple(target.shape)
        return self._emit("aten.expand.default", (ref, shape), {}, (target,))

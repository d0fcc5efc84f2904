"""What calls on tensors without data return, by the forms of their arguments.

Equal layers make equal calls. Of a call like an earlier one only the results are made, which takes
a fraction of the time in which torch finds out what they look like.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from merakc.frontend.calls.elementwise import Form, result_form
from merakc.frontend.replaced import replaced
from merakc.kernels.draws import KEY_POSITION

_NUMBERS = frozenset((int, float, bool, type(None)))
CPU, META = torch.device("cpu"), torch.device("meta")
# What `vars` gives, which of fake tensors goes by way of who asks while a forward runs.
_DICT_OF: Callable[[Any], dict[str, Any]] = torch.Tensor.__dict__["__dict__"].__get__
Make = Callable[[Form, torch.Tensor | None], torch.Tensor]
"""Makes a tensor of a form, in memory of its own or in that of another tensor."""
Bare = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Calls an op of `FOLLOWING` and gives meta tensors."""

# Ops of which torch's kernels for meta tensors say all that there is to say of a fake result: no
# device, no value and no choice among kernels of a CPU goes into it. What torch does for any op to
# find that out takes several times as long as the kernels.
FOLLOWING = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "addmm.default", "bmm.default", "cat.default", "constant_pad_nd.default",
        "contiguous.default", "cross_entropy_loss.default", "logical_not.default",
        "div.Tensor", "embedding.default", "expand.default", "gelu.default", "layer_norm.default",
        "linear.default", "masked_fill.Scalar", "matmul.default", "mean.dim", "mm.default",
        "mul.Tensor", "neg.default", "permute.default", "pow.Tensor_Scalar", "relu.default",
        "reshape.default", "rsqrt.default", "silu.default", "slice.Tensor", "softmax.int",
        "split.Tensor", "sub.Tensor", "tanh.default", "transpose.int", "tril.default",
        "unsqueeze.default", "view.default",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Results:
    """The forms of what a call returns, each with whether it is a view of the first argument.

    `kind` is what they come in, None of a tensor alone. Without forms it is the first argument.
    """

    kind: type | None
    forms: tuple[tuple[Form, bool], ...] = ()


class Forms:
    """Runs calls, and remembers what they returned.

    `make` makes a result once more. Of the tensors that are `plain` nothing matters but their form;
    calls on others are remembered for these very tensors. With `views` also results in the memory
    of an argument are made here; `memory` says which memory a tensor is in. Calls that are new are
    made by `bare`, where they can be.
    """

    def __init__(
        self,
        make: Make,
        plain: Callable[[torch.Tensor], bool],
        *,
        views: bool = False,
        bare: Bare | None = None,
        memory: Callable[[torch.Tensor], int] = lambda x: x.untyped_storage()._cdata,
    ) -> None:
        self._make, self._plain, self._views, self._bare = make, plain, views, bare
        self._memory = memory
        self._known: dict[Any, Results] = {}
        self._others: list[torch.Tensor] = []  # one that was gone might leave its id to another

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` returns."""
        traits = _traits(func)
        if traits.writes or not (self._views or traits.fresh):
            return func(*args, **kwargs)
        key = self.key(func, args, kwargs)
        found = self._known.get(key)
        source = _source(args)
        if found is None:
            found = self._following(func, args, kwargs, source)
            if found is not None:
                self._known[key] = found
        if found is not None and found.kind is None and not found.forms:
            return source
        if found is not None:
            made = self.made(found, args)
            return made[0] if found.kind is None else found.kind(made)
        out = func(*args, **kwargs)
        results = self._results(out, source, _given(args, kwargs), self._plain)
        if results is not None:
            self._known[key] = results
        return out

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """What results depend on: the op, the forms of its arguments, and the usual dtype."""
        at = _traits(func).key_position
        # Each draw has a key of its own, of no matter for its result.
        told = args if at is None else (*args[:at], None, *args[at + 1 :])
        named = self._form(tuple(kwargs.items())) if kwargs else ()
        return func, self._form(told), named, torch.get_default_dtype()

    def known(self, key: Hashable) -> Results | None:
        """What calls of this key return, once one has run."""
        return self._known.get(key)

    def made(self, results: Results, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Results of this form, of a call with these arguments."""
        source = _source(args)
        return [self._make(form, source if view else None) for form, view in results.forms]

    def _following(
        self, func: Any, args: Any, kwargs: Any, source: torch.Tensor | None
    ) -> Results | None:
        """What a call gives whose results follow from the forms of plain tensors alone."""
        given = _given(args, kwargs)
        if not all(map(self._plain, given)):
            return None
        form = result_form(op_name(func), args, kwargs)
        if form is not None:
            return Results(None, ((form, False),))
        if self._bare is None or op_name(func) not in FOLLOWING:
            return None
        try:
            out = self._bare(func, args, kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None  # torch's own way will say what is wrong
        return self._results(out, source, given, lambda x: type(x) is torch.Tensor)

    def _results(
        self,
        out: Any,
        source: torch.Tensor | None,
        given: list[torch.Tensor],
        plain: Callable[[torch.Tensor], bool],
    ) -> Results | None:
        """The form from which a result can be made again; None where a form is not enough."""
        if source is not None and out is source and self._views and self._plain(source):
            return Results(None)
        kind = type(out) if type(out) in (tuple, list) else None
        found: list[tuple[Form, bool]] = []
        memory = set(map(self._memory, given))
        for item in (out,) if kind is None else out:
            if not isinstance(item, torch.Tensor) or not plain(item):
                return None
            own = item.untyped_storage()._cdata
            view = source is not None and bool(own == source.untyped_storage()._cdata)
            if any(item is t for t in given) or item.is_conj() or item.is_neg():
                return None
            if item._has_symbolic_sizes_strides:  # of values, of which the next call has others
                return None
            if own in memory and not (view and self._views):
                return None
            offset = int(item.storage_offset())
            found.append(((tuple(item.shape), item.stride(), offset, item.dtype), view))
        return Results(kind, tuple(found))

    def _form(self, arg: Any) -> Any:
        """What results depend on. Types as well: 1 is equal to 1.0 and to True."""
        kind = type(arg)
        if kind in _NUMBERS:
            return kind, arg
        if isinstance(arg, torch.Tensor):
            if self._plain(arg):
                return (
                    arg.shape, arg.stride(), arg.storage_offset(), arg.dtype,
                    arg.is_conj(), arg.is_neg(),
                )  # fmt: skip
            if _is_empty(arg):
                return tuple(arg.shape), arg.dtype, "of no elements"
            self._others.append(arg)
            return id(arg)
        if isinstance(arg, (list, tuple)):
            return tuple([self._form(a) for a in arg])
        return kind, arg


def new_fake_mode(shape_env: Any = None) -> FakeTensorMode:
    """A mode in which calls are run on tensors that hold nothing; real ones may be among them.

    Without torch's cache of what calls return: what is known of a call is kept here, and that one
    grows with every shape. And without the stack of where it was made: it holds half a megabyte of
    source.
    """
    with replaced(traceback, "extract_stack", traceback.StackSummary):
        made = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)
    made.cache_enabled = False
    return made


def make_meta(form: Form, _: torch.Tensor | None) -> torch.Tensor:
    """A meta tensor in memory of its own."""
    shape, stride, _offset, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def make_fake(
    fake_mode: FakeTensorMode, form: Form, source: torch.Tensor | None = None
) -> FakeTensor:
    """A fake tensor of the CPU, in memory of its own or in that of `source`.

    Like one that `FakeTensor` makes, in a fifth of the time: it takes its fields from one of those.
    """
    shape, stride, offset, dtype = form
    with torch._C._DisableTorchDispatch():
        bare = torch.empty_strided(shape, stride, dtype=dtype, device=META)
        if source is not None:
            bare.set_(source.untyped_storage(), offset, shape, stride)
        made = torch.Tensor._make_subclass(
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=CPU
        )
        if fake_mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            torch._C._set_throw_on_mutable_data_ptr(made)
    _DICT_OF(made).update(_fields(), fake_mode=fake_mode)
    return made


@cache
def _fields() -> dict[str, Any]:
    """What a fake tensor holds that nothing is known of."""
    with torch._C._DisableTorchDispatch():
        found = dict(vars(FakeTensor(FakeTensorMode(), torch.empty(0, device=META), CPU)))
    del found["fake_mode"]
    return found


def memory_of(fake_mode: FakeTensorMode, x: torch.Tensor) -> int:
    """The memory of a tensor, or, of a real one, of the fake one that stands for it in calls."""
    if x.layout != torch.strided:
        return -id(x)
    if not isinstance(x, FakeTensor):
        x = fake_mode.from_tensor(x)
    return int(x.untyped_storage()._cdata)


def lifted(fake_mode: FakeTensorMode, value: torch.Tensor) -> FakeTensor | None:
    """What `lift_fresh` makes of a tensor of one number or none, which stays known; or None."""
    if type(value) is not torch.Tensor or value.device != CPU or value.numel() > 1:
        return None
    if value.layout != torch.strided or value.requires_grad or value.is_quantized:
        return None
    fake = make_fake(fake_mode, (tuple(value.shape), value.stride(), 0, value.dtype))
    with torch._C._DisableTorchDispatch():
        fake.constant = value.clone()
        fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)
    return fake


def run_bare(
    fake_mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a call on fake tensors gives on the meta tensors that they are."""
    with in_kernel_invocation_manager(fake_mode):
        return func(*args, **kwargs)


def is_plain_fake(x: torch.Tensor) -> bool:
    """Whether a tensor is fake, dense, of the CPU and of no known value."""
    known = type(x) is not FakeTensor or x.fake_device != CPU or x.constant is not None
    return not known and x.layout == torch.strided


def is_like_others(x: torch.Tensor) -> bool:
    """Whether calls on other tensors of the form of this one return the same."""
    return is_plain_fake(x) or _is_empty(x)


def _is_empty(x: torch.Tensor) -> bool:
    """Whether a tensor is fake, of the CPU, and known, and holds nothing: caches begin so."""
    if type(x) is not FakeTensor or x.fake_device != CPU or x.constant is None:
        return False
    return x.numel() == 0 and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _source(args: tuple[Any, ...]) -> torch.Tensor | None:
    """The argument that results may be views of."""
    return args[0] if args and isinstance(args[0], torch.Tensor) else None


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return tensors_of((args, tuple(kwargs.values())))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a nest of lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []


@cache
def op_name(func: Any) -> str:
    """`aten.add.Tensor`; an op puts it together whenever it is asked."""
    return str(func)


@dataclass(frozen=True, slots=True)
class _Traits:
    """Whether an op writes to arguments, and whether its results are in memory of their own; where
    in its arguments the key of a draw is.
    """

    writes: bool
    fresh: bool
    key_position: int | None


@cache
def _traits(func: Any) -> _Traits:
    schema = func._schema
    fresh = all(r.alias_info is None for r in schema.returns)
    return _Traits(bool(schema.is_mutable), fresh, KEY_POSITION.get(op_name(func)))

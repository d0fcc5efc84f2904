"""A module that runs as it is, as one op: `merakc::opaque`, and its backward as another.

The op is given the tensors that the module reads and the key of a `Call`, which every rank enters
here while it records the model. The forward keeps nothing but those tensors; the backward runs the
module again under autograd. Random numbers follow from the step's seeds, so that both draw the
same.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from merakc.errors import RecordError

OPAQUE, OPAQUE_BACKWARD = "merakc.opaque.default", "merakc.opaque_backward.default"
REACHED = "merakc.reached.default"
Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module in a recorded forward.

    `forward` computes tensors of the specs `outputs` from those that it is given, in order; `flops`
    is what it was seen to compute. `number` tells the calls of a recording apart. `source` is the
    line that could not be recorded, `reason` says why. A call of a part of a module has a `digest`
    of what it computes. `used` are the places of the inputs that backwards have found to be used
    since it was last cleared. A backward runs in `holding`, which puts the tensors where the
    module's parameters are: custom functions may look there. Where numbers say which parameters are
    used, `marks` has the number of each, by its name, and `used` the numbers.
    """

    forward: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    outputs: tuple[Spec, ...]
    module: str = ""
    source: str = ""
    reason: str = ""
    flops: int = 0
    number: int = 0
    digest: str = ""
    used: set[int] = field(default_factory=set)
    holding: Callable[[Sequence[Tensor]], AbstractContextManager[None]] = lambda _: nullcontext()
    marks: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The module's outputs, under whatever gradient mode and random state there is."""
        return self.forward(inputs)


_calls: WeakValueDictionary[str, Call] = WeakValueDictionary()


def enter(call: Call) -> str:
    """The key of a call, for as long as the call is held.

    It is the module's name, the digest and, in the form of Python's `repr`, an address.
    """
    key = f"{call.module} {call.digest}".strip() + f" at {id(call):#x}"
    _calls[key] = call
    return key


def find(key: str) -> Call:
    """The call of a key."""
    return _calls[key]


def is_entered(key: str) -> bool:
    """Whether the call of a key is held in this process."""
    return key in _calls


# What a compiled step calls


def opaque(inputs: Sequence[Tensor], seeds: Sequence[Tensor], key: str) -> list[Tensor]:
    """Runs the module's forward without a gradient.

    The results are contiguous, and share memory neither with `inputs` nor with each other.
    """
    call = find(key)
    with torch.no_grad(), drawing(seeds, call.number, inputs), autograd_reachable():
        found = call([x.detach() for x in inputs])
    # A check of the graph may run it in another precision.
    made = [(tuple(x.shape), x.dtype.is_floating_point) for x in found]
    if made != [(s, d.is_floating_point) for s, d in call.outputs]:
        raise RecordError(
            f"{call.source}: a part of the forward that runs as it is gives {made}, and when it "
            f"was recorded gave {call.outputs}; make the shapes the same for all data"
        )
    return _apart(found, inputs)


def opaque_backward(
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    key: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients of the `wanted` inputs, given those of the outputs; None is zero.

    The forward is run again for it. An input that the outputs do not depend on has zeros.
    """
    call = find(key)
    with torch.enable_grad(), drawing(seeds, call.number, inputs), autograd_reachable():
        own = [x.detach().requires_grad_(w) for x, w in zip(inputs, wanted, strict=True)]
        leaves = [x for x, w in zip(own, wanted, strict=True) if w]
        with call.holding(own):
            outs = zip(call(own), grads, strict=True)
            pairs = [(out, g) for out, g in outs if g is not None and out.requires_grad]
            found: Sequence[Tensor | None] = [None] * len(leaves)
            if pairs:
                outputs, given = [out for out, _ in pairs], [g for _, g in pairs]
                found = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    # What custom functions give by a backward() of their own, as reversible layers do.
    filled = [g if x.grad is None else g + x.grad for x, g in zip(leaves, filled, strict=True)]
    places = [k for k, w in enumerate(wanted) if w]
    made = zip(places, leaves, found, strict=True)
    call.used.update(k for k, x, g in made if g is not None or x.grad is not None)
    return _apart(filled, [g for g in grads if g is not None])


def reached(numbers: Tensor, key: str) -> Tensor:
    """The numbers, as they are; the call of the key has `used` them."""
    find(key).used.update(torch.unique(numbers).tolist())
    return numbers.clone()


def _apart(found: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, contiguous, each in memory of its own."""
    taken = {x.untyped_storage().data_ptr() for x in others}
    made: list[Tensor] = []
    for x in found:
        x = x.detach().contiguous()
        if x.untyped_storage().data_ptr() in taken:
            x = x.clone()
        taken.add(x.untyped_storage().data_ptr())
        made.append(x)
    return made


@contextlib.contextmanager
def drawing(seeds: Sequence[Tensor], number: int, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Seeds the global generators of torch, numpy and Python, and puts them back after."""
    devices = {x.device for x in inputs if x.device.type == "cuda"}
    states = random.getstate(), np.random.get_state()
    mixed = 0
    for value in (*(int(s.item()) for s in seeds), number):
        mixed = (mixed * 0x9E3779B97F4A7C15 + value + 1) % 2**63
    try:
        with torch.random.fork_rng(devices=[d.index for d in devices]):
            torch.manual_seed(mixed)
            random.seed(mixed)
            np.random.seed(mixed % 2**32)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def autograd_reachable() -> Iterator[None]:
    """Lets calls reach autograd: inside an op's kernel the dispatcher passes it by."""
    keys = [k for k in _AUTOGRAD if torch._C._dispatch_tls_is_dispatch_key_excluded(k)]
    for key in keys:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


_AUTOGRAD = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradMeta", "AutogradOther", "ADInplaceOrView")
)


# Registration


def _fake(inputs: Sequence[Tensor], seeds: Sequence[Tensor], key: str) -> list[Tensor]:
    like = [*inputs, *seeds][0]
    return [like.new_empty(shape, dtype=dtype) for shape, dtype in find(key).outputs]


def _fake_backward(
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    key: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, w in zip(inputs, wanted, strict=True) if w]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given, seeds, ctx.key = inputs
    ctx.number = len(given)
    ctx.save_for_backward(*given, *seeds)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[0])
    given, seeds = ctx.saved_tensors[: ctx.number], ctx.saved_tensors[ctx.number :]
    found = iter(
        torch.ops.merakc.opaque_backward(list(grads), list(given), list(seeds), ctx.key, wanted)
    )
    return [next(found) if w else None for w in wanted], [None] * len(seeds), None


torch.library.define("merakc::opaque", "(Tensor[] inputs, Tensor[] seeds, str key) -> Tensor[]")
torch.library.define(
    "merakc::opaque_backward",
    "(Tensor?[] grads, Tensor[] inputs, Tensor[] seeds, str key, bool[] wanted) -> Tensor[]",
)
torch.library.define("merakc::reached", "(Tensor numbers, str key) -> Tensor")
torch.library.impl("merakc::opaque", "default", opaque)
torch.library.impl("merakc::reached", "default", reached)
torch.library.impl("merakc::opaque_backward", "default", opaque_backward)
torch.library.register_fake("merakc::opaque", _fake)
torch.library.register_fake("merakc::opaque_backward", _fake_backward)
torch.library.register_fake("merakc::reached", lambda numbers, key: torch.empty_like(numbers))
torch.library.register_autograd("merakc::opaque", _differentiate, setup_context=_save)

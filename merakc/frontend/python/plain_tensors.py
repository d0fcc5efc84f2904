"""What a tensor carries beside its values, which a recording has to keep or to refuse: its class,
attributes, other tensors in the same memory, and who knows it by its identity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from merakc.errors import RecordError
from merakc.frontend.python.content import tensors_in
from merakc.frontend.python.state import Held

_CLASSES = (torch.Tensor, torch.nn.Parameter, UninitializedParameter, UninitializedBuffer)

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that users have set on a tensor."""
    is_ours = type(tensor).__module__.startswith("merakc.") or isinstance(tensor, FakeTensor)
    return {} if is_ours else dict(vars(tensor))


def keep_attributes(tensor: torch.Tensor, of: torch.Tensor | None) -> None:
    """Gives a tensor the attributes of the one that it stands for, but for those that it has."""
    if of is not None:
        told = attributes_of(of)
        vars(tensor).update({key: x for key, x in told.items() if not hasattr(tensor, key)})


def layout_reason(tensor: torch.Tensor) -> tuple[str, str]:
    """What is wrong with a tensor that is not dense, and the remedy; empty for one that is."""
    odd = str(tensor.layout) if tensor.layout != torch.strided else ""
    odd = "nested" if tensor.is_nested else "quantized" if tensor.dtype in _QUANTIZED else odd
    return _reason(odd) if odd else ("", "")


def call_reason(arguments: Iterable[Any]) -> tuple[str, str]:
    """The same of what a call makes with these arguments: of a quantized tensor torch tells the
    dtype of the dense one that it is made of.
    """
    quantized = any(isinstance(x, torch.dtype) and x in _QUANTIZED for x in arguments)
    return _reason("quantized") if quantized else ("", "")


def _reason(odd: str) -> tuple[str, str]:
    return (
        f"is a {odd} tensor, and merakc records dense ones",
        "give a dense one (to_dense, to_padded_tensor, dequantize)",
    )


def check_class(name: str, tensor: torch.Tensor) -> None:
    """Raises `RecordError` for a tensor of another layout than rows of elements, and for one of a
    class of its own: what its methods do, and what a forward makes of its class, would be lost.
    """
    if any(reason := layout_reason(tensor)):
        raise RecordError(f"{name} {'; '.join(reason)}")
    kind = type(tensor)
    is_known = kind in _CLASSES or kind.__module__.startswith("merakc.")
    if not is_known and not isinstance(tensor, FakeTensor):
        raise RecordError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, and merakc records plain tensors: "
            "what its class does would be lost; give tensor.as_subclass(torch.Tensor), or an "
            "nn.Parameter of it"
        )


def check_state(name: str, tensor: torch.Tensor, *, is_parameter: bool) -> None:
    """Raises `RecordError` for a parameter or buffer of which not all can be recorded."""
    what = f"{'parameter' if is_parameter else 'buffer'} '{name}'"
    check_class(what, tensor)
    if tensor.requires_grad and not is_parameter:
        raise RecordError(
            f"{what} requires a gradient, and merakc trains parameters alone; make it an "
            "nn.Parameter, or detach it"
        )
    for key, value in attributes_of(tensor).items():
        if any(True for _ in tensors_in(value)):
            raise RecordError(
                f"{what} has an attribute '{key}' that holds a tensor, of which a recording would "
                "know nothing; hold it as an attribute of the module"
            )


def check_identities(tensors: Mapping[str, torch.Tensor], held: Iterable[Held]) -> None:
    """Raises `RecordError` where the model's Python knows its tensors by what they are: as keys, or
    by `id()`. A recording has others in their places, which would be met nowhere.
    """
    known = {id(tensor): name for name, tensor in tensors.items()}
    for one in held:
        if one.part or not one.content:  # as of most: hooks that nobody has set
            continue
        for entry in _known(one.content, known):
            raise RecordError(
                f"{one.name or 'the model'} holds '{entry}' as a key, or its id(): recorded steps "
                "have other tensors in the place of parameters and buffers; go by their names"
            )


def _known(content: Mapping[Any, Any], names: Mapping[int, str]) -> Iterator[str]:
    for key, value in content.items():
        if isinstance(key, torch.Tensor) and id(key) in names:
            yield names[id(key)]
        for number in (key, value):
            if type(number) is int and number in names:
                yield names[number]


def check_memory(tensors: Mapping[str, torch.Tensor], written: Collection[str]) -> None:
    """Raises `RecordError` where one of the `written` tensors has memory in common with another."""
    for pair in _overlapping(tensors):
        if not set(pair).isdisjoint(written):
            one, other = sorted(pair, key=lambda name: name not in written)
            raise RecordError(
                f"'{one}' is written to, by the optimizer or the forward, and '{other}' is in the "
                "same memory, which a recorded step would leave as it is: let two parameters or "
                "buffers be one tensor, and give a batch one argument of it, or a clone()"
            )


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of different tensors that have memory in common."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in {id(t): (n, t) for n, t in tensors.items()}.values():
        if has_memory(tensor):
            span = *_span(tensor), name
            spans.setdefault(tensor.untyped_storage()._cdata, []).append(span)
    for own in spans.values():
        own.sort()
        for k, (_, end, one) in enumerate(own):
            for start, _, other in own[k + 1 :]:
                if start >= end:
                    break
                yield one, other


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie somewhere, and one can tell where."""
    told = not tensor.is_meta and not isinstance(tensor, FakeTensor)
    return told and tensor.layout == torch.strided and not tensor.is_nested and tensor.numel() > 0


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one memory may have elements in common."""
    (first, end), (start, last) = _span(one), _span(other)
    return start < end and first < last


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes that a tensor lies between, in its memory."""
    size = tensor.element_size()
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * size
    return first, first + (int(reach) + 1) * size


def check_batch(tensors: Mapping[str, torch.Tensor], *, with_values: bool = False) -> None:
    """Raises `RecordError` for tensors of a batch that carry more than values, or no values."""
    for name, tensor in tensors.items():
        check_class(f"'{name}' of the batch", tensor)
        if with_values and tensor.is_meta:
            raise RecordError(f"'{name}' of the batch is on the meta device, and has no values")
        told = [key for key in attributes_of(tensor) if not key.startswith("_dynamo_")]
        if told:
            raise RecordError(
                f"'{name}' of the batch has attributes of its own ({', '.join(told)}), of which a "
                "recorded step would know nothing; give what they hold beside it"
            )

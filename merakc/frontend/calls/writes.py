"""What in-place calls (`add_`, `out=`) write to, and the calls that compute the same value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

# In-place calls that turn a tensor into a view of what it was.
REVIEWS = ("squeeze_", "unsqueeze_", "t_", "transpose_", "detach_")


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that the op's schema says it writes to."""
    found = []
    for k, name in _written_places(func):
        if k < len(args):
            found.append(args[k])
        elif kwargs.get(name) is not None:
            found.append(kwargs[name])
    return found


@cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (k, argument.name)
        for k, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def functional(func: Any) -> Any | None:
    """The op that returns what `func` writes: `add` for `add_` and for `add.out`.

    It has the same arguments, less `out`. None where there is no such op.
    """
    if torch.Tag.inplace_view in func.tags and str(func).split(".")[1] not in REVIEWS:
        return None  # it changes how large the memory is, or whose
    namespace, name = func._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    wanted = _types(func)
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if not found._schema.is_mutable and _types(found) == wanted:
            return found
    return None


def without_out(func: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call less its `out=`."""
    outs = {a.name for a in func._schema.arguments if a.is_out}
    return {k: v for k, v in kwargs.items() if k not in outs}


def _types(func: Any) -> list[str]:
    return [str(a.type) for a in func._schema.arguments if not a.is_out]

"""Objects in a batch: tensors in dataclasses and mappings of other types are found, or refused.

torch's pytree takes what it does not know for a leaf. A batch is *opened* where it comes in: each
dataclass and mapping that pytree does not know stands as an `Opened`, whose tensors are leaves like
any other; the model gets the batch *closed* again.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils._pytree as pytree

from merakc.errors import ConfigError

T = TypeVar("T")
# Leaves that hold nothing else.
PLAIN = (
    torch.Tensor, type(None), bool, int, float, complex, str, bytes, Enum, type, range, slice,
    torch.dtype, torch.device, torch.Size, np.generic,
)  # fmt: skip
# How deep in an object, and in how many, tensors are looked for.
DEPTH, OBJECTS = 5, 1000


@dataclass(frozen=True)
class Kind:
    """What an opened object was: its type, and the names of its parts."""

    of: type
    names: tuple[Hashable, ...]
    template: Any = field(repr=False, compare=False)

    def made(self, values: Mapping[Hashable, Any]) -> Any:
        """An object of the kind, of other values."""
        made = copy.copy(self.template)
        for name, value in values.items():
            if is_dataclass(self.of):
                object.__setattr__(made, str(name), value)
            else:
                made[name] = value
        return made


class Opened:
    """A dataclass or mapping, as its parts by name."""

    def __init__(self, kind: Kind, parts: list[Any]) -> None:
        self.kind, self.parts = kind, parts


def _keyed(of: Opened) -> tuple[list[tuple[Any, Any]], Kind]:
    key = pytree.GetAttrKey if is_dataclass(of.kind.of) else pytree.MappingKey
    names: list[Any] = list(of.kind.names)
    return [(key(n), x) for n, x in zip(names, of.parts, strict=True)], of.kind


pytree.register_pytree_node(
    Opened,
    lambda of: (of.parts, of.kind),
    lambda parts, kind: Opened(kind, list(parts)),
    flatten_with_keys_fn=_keyed,
)


def opened(tree: T) -> T:
    """A batch, or arguments, with the objects in it opened.

    Raises `ConfigError`, with its name, for an object that holds tensors in another way.
    """
    if all(isinstance(leaf, PLAIN) for leaf in pytree.tree_leaves(tree)):
        return tree

    def open_leaf(path: Any, leaf: Any) -> Any:
        return leaf if isinstance(leaf, PLAIN) else _opened(leaf, path)

    made: T = pytree.tree_map_with_path(open_leaf, tree)
    return made


def _opened(leaf: Any, path: tuple[Any, ...]) -> Any:
    if is_dataclass(leaf):
        parts = {f.name: getattr(leaf, f.name) for f in fields(leaf) if hasattr(leaf, f.name)}
    elif isinstance(leaf, Mapping) and hasattr(leaf, "__setitem__"):
        parts = dict(leaf)
    else:
        _check(leaf, path)
        return leaf

    def below(name: Any, part: Any) -> Any:
        def open_part(more: Any, x: Any) -> Any:
            return x if isinstance(x, PLAIN) else _opened(x, (*path, name, *more))

        return pytree.tree_map_with_path(open_part, part)

    kind = Kind(type(leaf), tuple(parts), leaf)
    return Opened(kind, [below(pytree.MappingKey(n), x) for n, x in parts.items()])


def closed(tree: T) -> T:
    """The same with its objects as they were."""

    def close(x: Any) -> Any:
        if not isinstance(x, Opened):
            return x
        return x.kind.made(dict(zip(x.kind.names, map(closed, x.parts), strict=True)))

    made: T = pytree.tree_map(close, tree, is_leaf=lambda x: isinstance(x, Opened))
    return made


def _check(leaf: Any, path: tuple[Any, ...]) -> None:
    """Refuses an object that holds tensors, or arrays, where none can see them."""
    place = next(_hidden(leaf, type(leaf).__name__, set(), DEPTH), None)
    if place is None:
        return
    name = "batch" + "".join(map(str, path))
    if isinstance(leaf, np.ndarray):
        raise ConfigError(f"{name} is a numpy array; give a tensor (torch.from_numpy)")
    raise ConfigError(
        f"{name} is of type {type(leaf).__name__}, whose tensors merakc does not see ({place}), so "
        "that it cannot tell which samples they hold; give tensors in mappings, sequences or "
        "dataclasses, or register the type with torch.utils._pytree.register_pytree_node"
    )


def _hidden(x: Any, place: str, seen: set[int], depth: int) -> Iterator[str]:
    """Where an object holds tensors, or arrays."""
    if isinstance(x, (torch.Tensor, np.ndarray)):
        yield place
        return
    if isinstance(x, PLAIN) or id(x) in seen or depth == 0 or len(seen) > OBJECTS:
        return
    seen.add(id(x))
    held: dict[str, Any] = {}
    if isinstance(x, Mapping):
        held |= {f"[{k!r}]": v for k, v in x.items()}
    elif isinstance(x, (list, tuple, set, frozenset)):
        held |= {f"[{k}]": v for k, v in enumerate(x)}
    held |= {f".{k}": v for k, v in getattr(x, "__dict__", {}).items()}
    for kind in type(x).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            held[f".{name}"] = getattr(x, name, None)
    for name, value in held.items():
        yield from _hidden(value, place + name, seen, depth - 1)

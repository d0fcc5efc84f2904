"""Objects in a batch: tensors that they hide are refused, by name.

torch's pytree takes what it does not know for a leaf, of which every micro-batch would get the
whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from merakc.errors import ConfigError

# Leaves that hold nothing else.
PLAIN = (
    torch.Tensor, type(None), bool, int, float, complex, str, bytes, Enum, type, range, slice,
    torch.dtype, torch.device, torch.Size, np.generic,
)  # fmt: skip
# How deep in an object, and in how many, tensors are looked for.
DEPTH, OBJECTS = 5, 1000


def check_objects(tree: Any) -> None:
    """Raises `ConfigError` for objects that hold tensors, or arrays, where none can see them."""
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        place = next(_hidden(leaf, type(leaf).__name__, set(), DEPTH), None)
        if isinstance(leaf, torch.Tensor) or place is None:
            continue
        name = "batch" + pytree.keystr(path)
        if isinstance(leaf, np.ndarray):
            raise ConfigError(f"{name} is a numpy array; give a tensor (torch.from_numpy)")
        raise ConfigError(
            f"{name} is of type {type(leaf).__name__}, whose tensors merakc does not see ({place}),"
            " so that it cannot tell which samples they hold; give tensors in dicts, lists, tuples "
            "or dataclasses, or register the type with torch.utils._pytree.register_pytree_node"
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

"""Dataclasses in batches and in what forwards return: their fields are looked into, as in dicts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.utils._pytree as pytree


def open_dataclasses(tree: Any) -> None:
    """Tells torch's trees how to take the dataclasses in a tree apart, at any depth.

    A class that its library has registered stays as it is.
    """
    classes = {type(x) for x in pytree.tree_leaves(tree) if dataclasses.is_dataclass(type(x))}
    for cls in classes:
        _register(cls)
    if classes:
        open_dataclasses(tree)


def _register(cls: type[Any]) -> None:
    names = [field.name for field in dataclasses.fields(cls)]

    def flatten(value: Any) -> tuple[list[Any], list[str]]:
        held = [name for name in names if hasattr(value, name)]
        return [getattr(value, name) for name in held], held

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
        values, held = flatten(value)
        return [(pytree.GetAttrKey(n), v) for n, v in zip(held, values, strict=True)], held

    def unflatten(values: Any, held: list[str]) -> Any:
        made = object.__new__(cls)  # what its constructor does was done when the first was made
        for name, value in zip(held, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )

"""Plain data to JSON and back: numbers, texts, containers, and tensors by their names.

What a pickle could hold and JSON cannot is refused: loading a checkpoint runs no code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from merakc.errors import CheckpointError

PLAIN = (bool, int, str, type(None))
KIND = "__kind__"  # marks a dict that stands for something else
Tensors = dict[str, torch.Tensor]


def encode(value: Any, tensors: Tensors, name: str) -> Any:
    """The value as JSON can hold it; its tensors are put into `tensors`, under names from `name`.

    Raises `CheckpointError` for what is no plain data.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {KIND: "tensor", "name": name}
    if isinstance(value, (np.ndarray, np.generic)):
        tensors[name] = torch.from_numpy(np.array(value))
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {KIND: kind, "name": name}
    if type(value) in PLAIN:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {KIND: "float", "value": str(value)}
    if isinstance(value, (list, tuple)):
        items = [encode(v, tensors, f"{name}.{k}") for k, v in enumerate(value)]
        if type(value) is list:
            return items
        if type(value) is tuple:
            return {KIND: "tuple", "items": items}
    if isinstance(value, Mapping):
        if all(type(k) is str and k != KIND for k in value):
            return {k: encode(v, tensors, f"{name}.{k}") for k, v in value.items()}
        pairs = [
            [encode(k, tensors, f"{name}.key{n}"), encode(v, tensors, f"{name}.{n}")]
            for n, (k, v) in enumerate(value.items())
        ]
        return {KIND: "mapping", "items": pairs}
    if type(value) is complex or isinstance(value, bytes):
        text = value.hex() if isinstance(value, bytes) else str(value)
        return {KIND: type(value).__name__, "value": text}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "value": str(value).removeprefix("torch.")}
    raise CheckpointError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold: give numbers, texts, lists, tuples, dicts and tensors, or an object with "
        "state_dict() and load_state_dict()"
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    match value.get(KIND):
        case None:
            return {k: decode(v, tensors) for k, v in value.items()}
        case "tensor":
            return tensors[value["name"]]
        case "array":
            return tensors[value["name"]].numpy()
        case "number":
            return tensors[value["name"]].numpy()[()]
        case "tuple":
            return tuple(decode(v, tensors) for v in value["items"])
        case "mapping":
            return {decode(k, tensors): decode(v, tensors) for k, v in value["items"]}
        case "float":
            return float(value["value"])
        case "complex":
            return complex(value["value"])
        case "bytes":
            return bytes.fromhex(value["value"])
        case "dtype":
            return getattr(torch, value["value"])
    raise CheckpointError(f"the checkpoint holds a value of unknown kind {value[KIND]!r}")

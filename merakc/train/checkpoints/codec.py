"""Plain data to JSON and back: numbers, texts, containers, and tensors by their names.

What a pickle could hold and JSON cannot is refused: loading a checkpoint runs no code.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from merakc.errors import CheckpointError
from merakc.files.reading import MOST_DEPTH, check_depth

PLAIN = (bool, int, str, type(None))
KIND = "__kind__"  # marks a dict that stands for something else
_NUMPY = "?bhilqBHILQefdFD"  # the dtypes of numpy that torch has
Tensors = dict[str, torch.Tensor]


def encode(value: Any, tensors: Tensors, name: str) -> Any:
    """The value as JSON can hold it; its tensors are put into `tensors`, under names from `name`.

    Raises `CheckpointError` for what is no plain data, and for what a file is not read back with:
    values nested too deep, or in themselves, and whole numbers of thousands of digits.
    """
    try:
        found = _encoded(value, tensors, name)
        json.dumps(found)
        check_depth([[[[[[found]]]]]])  # where it stands in the manifest
    except (RecursionError, ValueError) as error:
        why = f"it is nested deeper than {MOST_DEPTH - 7}"
        why = str(error) if isinstance(error, ValueError) and "nested" not in str(error) else why
        raise CheckpointError(
            f"{name} cannot be kept in a checkpoint: {why}; give tensors, or plainer data"
        ) from None
    return found


def _encoded(value: Any, tensors: Tensors, name: str) -> Any:
    if isinstance(value, torch.Tensor):
        return {KIND: "tensor", "name": _kept(value, tensors, name)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.char in _NUMPY:
        own = np.array(value, dtype=value.dtype.newbyteorder("="))
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {KIND: kind, "name": _kept(torch.from_numpy(own), tensors, name)}
    if type(value) is str and not _is_utf8(value):
        return {KIND: "text", "value": value.encode(errors="surrogatepass").hex()}
    if type(value) in PLAIN:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {KIND: "float", "value": str(value)}
    if isinstance(value, (list, tuple)):
        items = [_encoded(v, tensors, f"{name}.{k}") for k, v in enumerate(value)]
        if type(value) is list:
            return items
        if type(value) is tuple:
            return {KIND: "tuple", "items": items}
    if type(value) is Counter:  # as MultiStepLR's milestones
        return {KIND: "counter", "value": _encoded(dict(value), tensors, name)}
    if isinstance(value, Mapping):
        if all(type(k) is str and k != KIND and _is_utf8(k) for k in value):
            return {k: _encoded(v, tensors, f"{name}.{k}") for k, v in value.items()}
        pairs = [
            [_encoded(k, tensors, f"{name}.key{n}"), _encoded(v, tensors, f"{name}.{n}")]
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


def _is_utf8(text: str) -> bool:
    """Whether a file can hold the text: names of files in other encodings have halves of characters
    in Python (PEP 383).
    """
    return text.isascii() or text == text.encode(errors="replace").decode()


def _kept(value: torch.Tensor, tensors: Tensors, name: str) -> str:
    """The name under which a tensor is kept: `a.b` may be a key, and `b` one inside of `a`."""
    if value.layout is not torch.strided or value.is_meta or value.is_nested or value.is_quantized:
        raise CheckpointError(
            f"{name} is a {type(value).__name__} of {value.dtype}, {value.layout} on "
            f"{value.device}, whose elements do not lie in memory one by one: give a dense tensor"
        )
    name = name.encode(errors="backslashreplace").decode()
    while name in tensors:
        name += "'"
    own = value.detach()  # which may be of a type that answers for parts
    tensors[name] = own.resolve_conj().resolve_neg() if type(own) is torch.Tensor else own
    return name


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `encode`. Raises `CheckpointError` for what that does not make."""
    try:
        return _decoded(value, tensors)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint's values are damaged: {error!r}") from None


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    match value.get(KIND):
        case None:
            return {k: _decoded(v, tensors) for k, v in value.items()}
        case "tensor":
            return tensors[value["name"]]
        case "array":
            return tensors[value["name"]].numpy()
        case "number":
            return tensors[value["name"]].numpy()[()]
        case "counter":
            return Counter(_decoded(value["value"], tensors))
        case "tuple":
            return tuple(_decoded(v, tensors) for v in value["items"])
        case "mapping":
            return {_decoded(k, tensors): _decoded(v, tensors) for k, v in value["items"]}
        case "float":
            return float(value["value"])
        case "complex":
            return complex(value["value"])
        case "text":
            return bytes.fromhex(value["value"]).decode(errors="surrogatepass")
        case "bytes":
            return bytes.fromhex(value["value"])
        case "dtype":
            dtype = getattr(torch, value["value"])
            if isinstance(dtype, torch.dtype):
                return dtype
    raise CheckpointError(f"the checkpoint holds {value!r}, a value of unknown kind")


def extras_of(every: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """What the user gave beside model and optimizers; where ranks gave their own, a list of all
    ranks' `extra`.
    """
    if len(every) == 1:
        return decode(every[0], tensors)
    found = [extras_of_rank(told, rank, tensors) for rank, told in enumerate(every)]
    return {"scheduler": found[0]["scheduler"], "extra": [own["extra"] for own in found]}


def extras_of_rank(told: Any, rank: int, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What one of several ranks gave."""
    prefix = f"rank{rank}."
    own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    return decode(told, own)

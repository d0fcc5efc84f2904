"""Reads files that may be damaged or hostile: bounded, and nothing in them is passed over."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Plans of the largest models take some hundred kilobytes; read, JSON takes up to 24 times as much.
MOST_BYTES = 1 << 24
# Real files nest up to ten deep. Behind it, what walks through values runs out of stack.
MOST_DEPTH = 50
MOST_NUMBER = (1 << 63) - 1


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a regular file in UTF-8.

    Raises `OSError` where it cannot be opened and `ValueError` where it is no text, larger, or a
    pipe or a device, which might never end.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise ValueError(f"{path} is no regular file")
    with open(file, "rb") as opened:
        data = opened.read(min(most_bytes, found.st_size) + 1)  # room is made for so many
    if len(data) > most_bytes:
        raise ValueError(f"larger than {most_bytes:,} bytes")
    return data.decode("utf-8")


def parse_json(text: str) -> Any:
    """The value that JSON stands for; infinities, which Python writes, are numbers.

    Raises `ValueError` for what is no JSON and for what nothing can be made of: a key that an
    object has twice, where one of two values would be lost, NaN, whole numbers of more than 64
    bits, and values nested deeper than `MOST_DEPTH`.
    """
    try:
        found = json.loads(
            text, object_pairs_hook=_object, parse_int=_whole, parse_constant=_constant
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {MOST_DEPTH}") from None
    check_depth(found)
    return found


def check_depth(value: Any) -> None:
    """Raises `ValueError` for values nested deeper than `MOST_DEPTH`."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [inner for own in level for inner in _inside(own)]
    if level:
        raise ValueError(f"nested deeper than {MOST_DEPTH}")


def misread(said: Any, means: Any, where: str) -> Iterator[str]:
    """What stands in a file's values `said` and not in the values `means` that were made of them:
    a key that was passed over, a text that was taken for a number. Defaults may have been added.
    """
    if isinstance(said, Mapping) and isinstance(means, Mapping):
        for key, value in said.items():
            if key in means:
                yield from misread(value, means[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} has no meaning"
    elif isinstance(said, list) and isinstance(means, (list, tuple)) and len(said) == len(means):
        for k, (one, other) in enumerate(zip(said, means, strict=True)):
            yield from misread(one, other, f"{where}[{k}]")
    elif said != means or isinstance(said, bool) is not isinstance(means, bool):
        yield f"{where} is {str(said)[:40]!r}, where {type(means).__name__} is meant"


def decompressed(data: bytes, most_bytes: int = MOST_BYTES) -> bytes:
    """What zlib packed. Raises `ValueError` where it is damaged, or unpacks to more."""
    unpacker = zlib.decompressobj()
    try:
        found = unpacker.decompress(data, most_bytes)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpacker.eof:
        raise ValueError(f"cut off, or unpacks to more than {most_bytes:,} bytes")
    return found


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for k, name in enumerate(names) if name in names[:k])
        raise ValueError(f"the key {twice!r} stands there twice; keep one of them")
    return found


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -MOST_NUMBER <= (found := int(digits)) <= MOST_NUMBER:
        raise ValueError(f"the number {digits[:20]}... has more than 64 bits")
    return found


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN stands where a number must")
    return float(name)


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()

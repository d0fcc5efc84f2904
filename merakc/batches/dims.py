"""Where the samples of a batch stand: as users say it, and what it may be where they do not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from merakc.batches.split import (
    batch_size_of,
    dims_key,
    named_tensors,
    one_by_one,
    sample_rows,
    shown_dims,
)
from merakc.errors import ConfigError
from merakc.ir.batches import BatchDims, Rows

# The dim of a tensor's samples; with the rows that each sample has there, None for as many as there
# are; None for no samples.
GivenDim = int | tuple[int, int | None] | None
GivenDims = Mapping[str, GivenDim]
# How unlikely a place is: another dim than the first counts as its number, and several rows a
# sample as one. A tensor that has the samples' size somewhere is rarely the same for all.
SEVERAL, NOT_SAMPLES = 1, 3
# Kinds of tensors whose places are varied, those with the likeliest second place first; those of
# others are taken to be the likeliest.
MOST_KINDS = 6


def parse_batch_dims(given: GivenDims | None) -> dict[str, Rows | None]:
    """The places that a user gives. Raises `ConfigError` for what is none."""
    return {name: _place(name, value) for name, value in (given or {}).items()}


def _place(name: str, value: object) -> Rows | None:
    if value is None:
        return None
    numbers = value if isinstance(value, (tuple, list)) else (value, 1)
    match numbers:
        case (int(dim), int(each)) if dim >= 0 and each > 0 and not isinstance(dim, bool):
            return Rows(dim, 1, each)
        case (int(dim), None) if dim >= 0:
            return Rows(dim, 1, 0)
    raise ConfigError(
        f"batch_dims[{name!r}] is {value!r}; give the dim (0 or more) in which the tensor holds "
        "the samples, (dim, rows of each sample), or None where it is the same for all samples"
    )


def check_batch_dims(args: Sequence[Any], kwargs: Mapping[str, Any], dims: BatchDims) -> None:
    """Raises `ConfigError` where places are given of tensors that the batch does not have, or that
    do not fit it.
    """
    named = named_tensors(args, kwargs)
    used = {dims_key(name, dims) for name in named}
    for key in dims:
        if key not in used:
            raise ConfigError(
                f"batch_dims names {key!r}; the batch's tensors are {', '.join(named) or 'none'}"
            )
    sample_rows(args, kwargs, dims)


def hypotheses(
    args: Sequence[Any], kwargs: Mapping[str, Any], dims: BatchDims
) -> Iterator[dict[str, Rows | None]]:
    """Where the samples of a batch may stand other than by the commonest size of dim 0, likeliest
    first; what `dims` say holds.
    """
    named = named_tensors(args, kwargs)
    size = batch_size_of(args, kwargs, dims)
    fixed = {n: dims[k] for n in named if (k := dims_key(n, dims)) is not None}
    listed = one_by_one(named)
    kinds: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name, tensor in named.items():
        if name not in fixed and tensor.dim() and name not in listed:
            kinds.setdefault((tensor.shape, tensor.dtype), []).append(name)
    sizes = [size]
    if all(rows is None for rows in fixed.values()):
        sizes += _other_sizes(size, [shape for (shape, _), names in kinds.items() for _ in names])
    by_size = {n: Rows() if s and s[0] == size else None for (s, _), own in kinds.items()
               for n in own}  # fmt: skip
    for samples in sizes:
        places = [_places(shape, samples) for shape, _ in kinds]
        doubtful = sorted(range(len(places)), key=lambda k: _doubt(places[k]))
        varied = [p if k in doubtful[:MOST_KINDS] else p[:1] for k, p in enumerate(places)]
        for choice in sorted(itertools.product(*varied), key=lambda c: sum(cost for cost, _ in c)):
            found = fixed | {
                n: rows for own, (_, rows) in zip(kinds.values(), choice, strict=True) for n in own
            }
            counted = any(rows is not None and rows.inner for rows in found.values())
            if counted and (samples != size or found != fixed | by_size):
                yield found


def _other_sizes(size: int, shapes: Sequence[torch.Size]) -> list[int]:
    """What else may be the number of samples: in as many tensors, those of most first."""
    holding = {n: sum(n in s for s in shapes) for s in shapes for n in s if n > 1}
    first = {n: min(list(s).index(n) for s in shapes if n in s) for n in holding}
    others = [n for n, count in holding.items() if n != size and count >= holding.get(size, 0)]
    return sorted(others, key=lambda n: (-holding[n], first[n]))


def _places(shape: torch.Size, samples: int) -> list[tuple[int, Rows | None]]:
    """Where a tensor may hold so many samples, with how unlikely that is; likeliest first."""
    found: list[tuple[int, Rows | None]]
    found = [(dim, Rows(dim)) for dim, n in enumerate(shape) if n == samples]
    found.append((NOT_SAMPLES if found else 0, None))
    if shape[0] > samples > 1 and shape[0] % samples == 0:
        found.append((SEVERAL, Rows(0, 1, 0)))
    return sorted(found, key=lambda place: place[0])


def _doubt(places: Sequence[tuple[int, Rows | None]]) -> float:
    """How unlikely the second place of a tensor is."""
    return places[1][0] if len(places) > 1 else math.inf


def ambiguous(readings: Sequence[BatchDims]) -> ConfigError:
    """That a batch can be read in several ways."""
    listed = " or ".join(f"batch_dims={shown_dims(dims)}" for dims in readings)
    return ConfigError(
        f"the samples of this batch may stand in several ways, and data-parallel ranks have to "
        f"know which: give auto_parallel {listed}"
    )

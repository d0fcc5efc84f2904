"""Batches: split into micro-batches, and results put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from merakc.errors import ConfigError
from merakc.files.printable import count_of
from merakc.ir.batches import BY_SIZE, BatchDims, Rows

MOST_SHOWN = 12  # tensors of a batch in a message
MOST_NAMES = 4096  # of tensors, of which it is known what they match
TensorSpecs = list[tuple[tuple[int, ...], torch.dtype]]


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch as the model is called with it: a mapping by keyword, a sequence by position."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def batch_size_of(args: Sequence[Any], kwargs: Mapping[str, Any], dims: BatchDims = BY_SIZE) -> int:
    """The number of samples of a batch, as `dims` say; where they do not, the commonest size of dim
    0 of its tensors.

    Raises `ConfigError` where the batch holds no tensor with dims, and where `dims` do not fit it.
    """
    return _size(named_tensors(args, kwargs), dims, args, kwargs)


def sample_rows(
    args: Sequence[Any], kwargs: Mapping[str, Any], dims: BatchDims = BY_SIZE
) -> dict[str, Rows]:
    """Where the samples stand in the tensors of a batch, by name; a tensor without any is left
    out.
    """
    named = named_tensors(args, kwargs)
    size, listed = _size(named, dims, args, kwargs), one_by_one(named)
    found: dict[str, Rows] = {}
    for name, tensor in named.items():
        key = dims_key(name, dims)
        fits = tensor.dim() and tensor.shape[0] == size and name not in listed
        by_size = Rows() if fits else None
        rows = dims[key] if key is not None else by_size
        if rows is not None:
            found[name] = _closed(name, tensor, rows, size)
    return found


def one_by_one(named: Mapping[str, torch.Tensor]) -> set[str]:
    """The tensors in sequences whose tensors are of unlike lengths, as the boxes of each image are:
    dim 0 of one holds no samples.
    """
    lists: dict[str, list[str]] = {}
    for name in named:
        lists.setdefault(list_pattern(name), []).append(name)
    unlike = (own for own in lists.values() if len({named[n].shape[:1] for n in own}) > 1)
    return {name for own in unlike for name in own}


@lru_cache(maxsize=MOST_NAMES)
def list_pattern(name: str) -> str:
    """The name of a tensor of a batch, with a star for its place in each list."""
    first, *steps = name.split(".")
    return ".".join([first, *("*" if step.isdigit() else step for step in steps)])


def dims_key(name: str, dims: BatchDims) -> str | None:
    """The key of `dims` that says where a tensor's samples stand: its name, or the first pattern
    that fits it.
    """
    if not dims or name in dims:
        return name if dims else None
    return _fitting(name, tuple(dims))


@lru_cache(maxsize=MOST_NAMES)
def _fitting(name: str, patterns: tuple[str, ...]) -> str | None:
    """The first pattern that fits a name: asked of the same ones in every step."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _size(
    named: Mapping[str, torch.Tensor],
    dims: BatchDims,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> int:
    said = {n: dims[k] for n in named if (k := dims_key(n, dims)) is not None}
    sizes = {
        n: _said_size(n, named[n], rows)
        for n, rows in said.items()
        if rows is not None and rows.inner
    }
    if len(set(sizes.values())) > 1:
        listed = ", ".join(
            f"{n} in '{name}' of shape {list(named[name].shape)}" for name, n in sizes.items()
        )
        raise ConfigError(
            f"batch_dims does not fit the batch: the samples are {listed}; give the dims that hold "
            f"one sample in each place: batch_dims={shown_dims(said)}"
        )
    if sizes:
        return next(iter(sizes.values()))
    unlike = one_by_one(named)
    firsts = [t.shape[0] for n, t in named.items() if t.dim() and n not in {*said, *unlike}]
    if not firsts and unlike:
        first = min(unlike)
        raise ConfigError(
            "the batch holds no tensor with a batch dim (dim 0): its tensors stand in lists, and "
            f"are of unlike lengths ('{first}' of shape {list(named[first].shape)}); give one "
            "tensor of all samples (torch.nn.utils.rnn.pad_sequence), or another beside them that "
            "has a row for each sample, such as their lengths or labels"
        )
    if not firsts:
        raise ConfigError(
            f"the batch holds no tensor with a batch dim (dim 0): {_kinds(args, kwargs)}; give a "
            "mapping of names to tensors, a sequence of tensors, or a tensor"
        )
    return max(firsts, key=lambda s: (firsts.count(s), s))


def _closed(name: str, tensor: torch.Tensor, rows: Rows, samples: int) -> Rows:
    """The place with the number of rows that each sample has; 0 stands for as many as there are."""
    if rows.inner:
        return rows
    count = tensor.shape[rows.dim] if rows.dim < tensor.dim() else 0
    if not count or count % samples:
        raise ConfigError(
            f"batch_dims says that dim {rows.dim} of '{name}' holds rows of "
            f"{count_of(samples, 'sample')}; it is of shape {list(tensor.shape)}: give each sample "
            "as many rows as the others"
        )
    return replace(rows, inner=count // samples)


def _said_size(name: str, tensor: torch.Tensor, rows: Rows) -> int:
    shape, each = list(tensor.shape), rows.outer * rows.inner
    if rows.dim >= len(shape):
        raise ConfigError(
            f"batch_dims says that the samples of '{name}' stand in dim {rows.dim}; it is of shape "
            f"{shape}: give a dim of it, or None where it is the same for all samples"
        )
    if shape[rows.dim] % each:
        raise ConfigError(
            f"batch_dims says that dim {rows.dim} of '{name}' holds {count_of(each, 'row')} for "
            f"each sample; it is of shape {shape}, and {shape[rows.dim]} does not divide by {each}"
        )
    return rows.samples(shape)


def shown_dims(dims: BatchDims) -> str:
    """Where samples stand, as users write it."""

    def shown(rows: Rows | None) -> object:
        if rows is None:
            return None
        return rows.dim if rows.inner == 1 else (rows.dim, rows.inner or None)

    return repr({name: shown(rows) for name, rows in dims.items()})


def taken_dims(dims: BatchDims) -> str:
    """That samples are taken to stand so in a batch, and how to say that they stand elsewhere."""
    first = shown_dims(dict(list(dims.items())[:MOST_SHOWN]))
    more = f" and None for {len(dims) - MOST_SHOWN} more" if len(dims) > MOST_SHOWN else ""
    return (
        f"samples are taken to stand at batch_dims={first}{more} (the dim of each tensor that "
        "holds them, None where it is the same for all, or (dim, rows of a sample)): where they "
        "stand elsewhere, give auto_parallel batch_dims that say so"
    )


def divisors(samples: int) -> list[int]:
    """Into how many equal parts so many samples divide."""
    return [d for d in range(1, samples + 1) if samples % d == 0]


def split_batch(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    micro_batches: int,
    dims: BatchDims = BY_SIZE,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each micro-batch.

    Tensors that hold samples, where `dims` or their sizes say, are split by them, in order; all
    others are given to every micro-batch as they are. Raises `ConfigError` where the batch does not
    divide.
    """
    if micro_batches == 1:
        return [(tuple(args), dict(kwargs))]
    size = batch_size_of(args, kwargs, dims)
    if micro_batches < 1 or size % micro_batches:
        raise ConfigError(
            f"a batch of {count_of(size, 'sample')} does not divide into {micro_batches} "
            f"micro-batches; micro_batches must divide {size}: {divisors(size)}"
        )
    each, sampled = size // micro_batches, sample_rows(args, kwargs, dims)

    def part(first: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return with_samples(args, kwargs, sampled, lambda rows, leaf: rows.take(leaf, first, each))

    return [part(k * each) for k in range(micro_batches)]


def resized(
    args: Sequence[Any], kwargs: Mapping[str, Any], sampled: Mapping[str, Rows], samples: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch with so many samples: its first ones, or all of them several times over. Where it
    has no values, they have none either.
    """

    def changed(rows: Rows, leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_meta or isinstance(leaf, FakeTensor):
            shape = rows.sized(leaf.shape, samples)
            return torch.empty(shape, dtype=leaf.dtype, device="meta")
        own = rows.samples(leaf.shape)
        times, rest = divmod(samples, own)
        parts = [leaf] * times + ([rows.take(leaf, 0, rest)] if rest else [])
        return rows.join(parts)

    return with_samples(args, kwargs, sampled, changed)


def with_samples(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sampled: Mapping[str, Rows],
    change: Callable[[Rows, torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the tensors that hold samples, where `sampled` says, changed."""

    def changed(path: Any, leaf: Any) -> Any:
        rows = sampled.get(path_name(path)) if isinstance(leaf, torch.Tensor) else None
        return leaf if rows is None else change(rows, leaf)

    found: tuple[tuple[Any, ...], dict[str, Any]]
    found = pytree.tree_map_with_path(changed, (tuple(args), dict(kwargs)))
    return found


def cast_floats(
    args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with their floating tensors in `dtype`; as they are where that is None."""

    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    found: tuple[tuple[Any, ...], dict[str, Any]] = (tuple(args), dict(kwargs))
    return pytree.tree_map(cast, found) if dtype else found


def named_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a batch by the names that a recording gives them."""
    leaves, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    return {path_name(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def path_name(path: Sequence[Any]) -> str:
    """The name of a leaf of (args, kwargs): `input_ids`, `0`, `targets.boxes`."""
    return ".".join([_step(p) for p in path[1:]])


def _step(entry: Any) -> str:
    """A mapping's key, a sequence's index or a named tuple's field."""
    if type(entry) is pytree.MappingKey:  # most are
        return str(entry.key)
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a compiled step depends on: structure, shapes, dtypes, whether a tensor asks for a
    gradient, and the values of non-tensors.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    asks = torch.is_grad_enabled()
    facts = [
        (tuple(x.shape), x.dtype, asks and x.requires_grad)
        if isinstance(x, torch.Tensor)
        else repr(x)
        for x in leaves
    ]
    return (str(spec), tuple(facts))


def tensor_specs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> TensorSpecs:
    """Shape and dtype of every tensor of a batch, in order."""
    return [(tuple(t.shape), t.dtype) for t in _tensors((tuple(args), dict(kwargs)))]


def with_tensor_specs(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    specs: TensorSpecs,
    tensors: Sequence[torch.Tensor] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same batch with tensors of other shapes and dtypes, on the meta device; or with other
    `tensors`, if there are any.

    Raises `ConfigError` where the batch holds another number of tensors.
    """
    found = len(tensor_specs(args, kwargs))
    if found != len(specs):
        raise ConfigError(
            f"the example batch holds {found} tensors, rank 0's {len(specs)}; give all ranks "
            "batches of the same structure"
        )
    now = iter(tensors) if tensors else _on_meta(specs)

    def replaced(leaf: Any) -> Any:
        return next(now) if isinstance(leaf, torch.Tensor) else leaf

    made: tuple[tuple[Any, ...], dict[str, Any]]
    made = pytree.tree_map(replaced, (tuple(args), dict(kwargs)))
    return made


def _on_meta(specs: TensorSpecs) -> Iterator[torch.Tensor]:
    return (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in specs)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in order."""
    return _tensors(call_arguments(batch))


def _kinds(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    leaves, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    kinds = [f"{path_name(path)} is of type {type(leaf).__name__}" for path, leaf in leaves]
    return ", ".join(kinds) or "it is empty"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]

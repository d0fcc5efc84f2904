"""Batches: split into micro-batches, and results put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.errors import ConfigError
from merakc.ir.batches import Rows

TensorSpecs = list[tuple[tuple[int, ...], torch.dtype]]


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch as the model is called with it: a mapping by keyword, a sequence by position."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def batch_size_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The number of samples of a batch: the commonest size of dim 0 of its tensors.

    Raises `ConfigError` where the batch holds no tensor with dims.
    """
    sizes = [t.shape[0] for t in _tensors((tuple(args), dict(kwargs))) if t.dim()]
    if not sizes:
        raise ConfigError(
            f"the batch holds no tensor with a batch dim (dim 0): {_kinds(args, kwargs)}; give a "
            "mapping of names to tensors, a sequence of tensors, or a tensor"
        )
    return max(sizes, key=lambda s: (sizes.count(s), s))


def sample_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Rows]:
    """Where the samples stand in the tensors of a batch, by name; a tensor without any is left
    out.
    """
    size = batch_size_of(args, kwargs)
    named = named_tensors(args, kwargs)
    return {n: Rows() for n, t in named.items() if t.dim() and t.shape[0] == size}


def split_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any], micro_batches: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each micro-batch.

    Tensors that hold samples are split by them, in order; all others are given to every micro-batch
    as they are. Raises `ConfigError` where the batch does not divide.
    """
    size, sampled = batch_size_of(args, kwargs), sample_rows(args, kwargs)
    if micro_batches < 1 or size % micro_batches:
        raise ConfigError(
            f"a batch of {size} samples does not divide into {micro_batches} micro-batches; "
            f"micro_batches must divide {size}: "
            f"{[d for d in range(1, size + 1) if size % d == 0]}"
        )
    each = size // micro_batches

    def part(first: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _changed(args, kwargs, sampled, lambda rows, leaf: rows.take(leaf, first, each))

    if micro_batches == 1:
        return [(tuple(args), dict(kwargs))]
    return [part(k * each) for k in range(micro_batches)]


def resized(
    args: Sequence[Any], kwargs: Mapping[str, Any], sampled: Mapping[str, Rows], samples: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch with so many samples; the tensors that hold them are on the meta device."""
    return _changed(
        args, kwargs, sampled,
        lambda rows, leaf: torch.empty(
            rows.sized(leaf.shape, samples), dtype=leaf.dtype, device="meta"
        ),
    )  # fmt: skip


def _changed(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sampled: Mapping[str, Rows],
    change: Callable[[Rows, torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the tensors that hold samples changed."""

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
    return ".".join(_step(p) for p in path[1:])


def _step(entry: Any) -> str:
    """A mapping's key, a sequence's index or a named tuple's field."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a compiled step depends on: structure, shapes, dtypes and the values of non-tensors."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    facts = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
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

"""Batches: split into micro-batches, and results put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.errors import ConfigError

TensorSpecs = list[tuple[tuple[int, ...], torch.dtype]]


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch as the model is called with it: a mapping by keyword, a sequence by position."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def batch_size_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The size of dim 0 of the batch's tensors: the commonest one among those with dims.

    Raises `ConfigError` where the batch holds no tensor with dims.
    """
    sizes = [t.shape[0] for t in _tensors((tuple(args), dict(kwargs))) if t.dim()]
    if not sizes:
        raise ConfigError(
            f"the batch holds no tensor with a batch dim (dim 0): {_kinds(args, kwargs)}; give a "
            "mapping of names to tensors, a sequence of tensors, or a tensor"
        )
    return max(sizes, key=lambda s: (sizes.count(s), s))


def split_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any], micro_batches: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each micro-batch.

    Tensors whose dim 0 is the batch size are split along it, in order; all others are given to
    every micro-batch as they are. Raises `ConfigError` where the batch does not divide.
    """
    size = batch_size_of(args, kwargs)
    if micro_batches < 1 or size % micro_batches:
        raise ConfigError(
            f"a batch of {size} samples does not divide into {micro_batches} micro-batches; "
            f"micro_batches must divide {size}: "
            f"{[d for d in range(1, size + 1) if size % d == 0]}"
        )
    each = size // micro_batches

    def part(leaf: Any, k: int) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size:
            return leaf[k * each : (k + 1) * each]
        return leaf

    return [
        pytree.tree_map(lambda leaf, k=k: part(leaf, k), (tuple(args), dict(kwargs)))
        for k in range(micro_batches)
    ]


def cast_floats(
    args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with their floating tensors in `dtype`; as they are where that is None."""

    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    found: tuple[tuple[Any, ...], dict[str, Any]] = (tuple(args), dict(kwargs))
    return pytree.tree_map(cast, found) if dtype else found


def sampled_names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The names of the tensors that `split_batch` splits: they hold samples along dim 0."""
    size = batch_size_of(args, kwargs)
    named = named_tensors(args, kwargs)
    return frozenset(n for n, t in named.items() if t.dim() and t.shape[0] == size)


def doubled(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: frozenset[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every sample of the tensors of these names twice."""
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_with_path(
        lambda path, leaf: torch.cat([leaf, leaf]) if path_name(path) in names else leaf,
        (tuple(args), dict(kwargs)),
    )
    return found


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


def join_results(parts: Sequence[torch.Tensor], micro_batch_size: int) -> torch.Tensor:
    """One result of all micro-batches: joined along dim 0, or averaged where it has no such dim."""
    if parts[0].dim() and parts[0].shape[0] == micro_batch_size:
        return torch.cat(list(parts))
    return torch.stack(list(parts)).mean(0) if parts[0].is_floating_point() else parts[0]


def _kinds(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    leaves, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    kinds = [f"{path_name(path)} is of type {type(leaf).__name__}" for path, leaf in leaves]
    return ", ".join(kinds) or "it is empty"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]

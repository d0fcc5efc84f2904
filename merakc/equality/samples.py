"""Weights and batches to compare with: drawn from a seed, the same for both sides."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from merakc.batches.split import (
    batch_size_of,
    call_arguments,
    cast_floats,
    named_tensors,
    sample_rows,
    with_samples,
)
from merakc.ir.batches import BatchDims
from merakc.planner.sources.source import Source, source_of
from merakc.train.parameters.initial import initialise

# Added to every weight: a norm's ones and a bias's zeros would hide what becomes of them.
NOISE = 0.02
# Below are the padding and the ends of a text, in most vocabularies.
FIRST_WORD = 3
MASK = "attention_mask"
WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip


@contextmanager
def drawn_model(source: Source, seed: int) -> Iterator[nn.Module]:
    """A model of the source on the CPU, in float64, with weights drawn from a seed.

    A function's own model keeps its weights, but for some noise, its modes and its hooks: it is
    that model itself, which a copy would not be in all respects, until the context is left.
    """
    with ExitStack() as stack:
        if source.config is None:
            stack.callback(_kept(source.model))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _initialised(source, seed)
            for tensor in (*model.parameters(), *model.buffers()):
                wide = WIDER.get(tensor.dtype, tensor.dtype)
                tensor.data = tensor.data.to("cpu", wide, copy=True)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        yield model


def _initialised(source: Source, seed: int) -> nn.Module:
    """The source's model, with weights."""
    if source.config is not None:
        return source_of(source.name, source.config, source.sequence, "cpu").model
    if any(t.is_meta for t in (*source.model.parameters(), *source.model.buffers())):
        initialise(source.model, seed)
    return source.model


def _kept(model: nn.Module) -> Callable[[], None]:
    """What gives a model the tensors back that it has now."""
    held = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    data = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]

    def restore() -> None:
        for module, parameters, buffers in held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        for tensor, values in data:
            tensor.data = values

    return restore


def drawn_batch(
    source: Source, samples: int, seed: int, *, parts: int = 1, padded: bool = False
) -> Any:
    """A batch of so many samples, floating tensors in float64.

    Of a configuration, random numbers: samples have different numbers of labels, some none, nor has
    any of one of the `parts`; `padded` texts end early, where the model takes an attention mask. A
    function's own batch is repeated, from another sample on for each seed.
    """
    if source.example is not None:
        return _repeated(source.example, samples, seed, source.dims)
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = call_arguments(source.batch(samples))
    assert not args, "batches of configurations are mappings"
    found = {n: _drawn(value, source.bounds.get(n), generator) for n, value in kwargs.items()}
    if "labels" in found and not found["labels"].is_floating_point():
        found["labels"] = _uneven(found["labels"], parts, generator, source.ignored)
    takes_mask = MASK in inspect.signature(source.model.forward).parameters
    if padded and "input_ids" in found and takes_mask:
        length = found["input_ids"].shape[1]
        lengths = torch.randint(length // 3 + 1, length + 1, (samples, 1), generator=generator)
        found[MASK] = (torch.arange(length) < lengths).long()
    return found


def _drawn(value: Any, bound: int | None, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)
    assert bound is not None, "a source tells how many values its integers have"
    low = FIRST_WORD if bound > 2 * FIRST_WORD and value.dim() > 1 else 0
    return torch.randint(low, bound, value.shape, generator=generator, dtype=value.dtype)


def _uneven(
    labels: torch.Tensor, parts: int, generator: torch.Generator, ignored: int
) -> torch.Tensor:
    """The labels, any number of each sample's: all of one, none of the next, none of a part."""
    flat = labels.reshape(len(labels), -1)
    length, each = flat.shape[1], len(labels) // parts
    counts = torch.randint(0, length + 1, (len(labels), 1), generator=generator)
    full, empty = torch.randperm(parts, generator=generator)[:2].tolist() if parts > 1 else (0, 1)
    counts[full * each] = length
    counts[full * each + 1 : full * each + min(each, 2)] = 0
    counts[empty * each : (empty + 1) * each] = 0
    order = torch.rand(flat.shape, generator=generator).argsort(1).argsort(1)
    return flat.masked_fill(order >= counts, ignored).reshape(labels.shape)


def _repeated(batch: Any, samples: int, seed: int, dims: BatchDims) -> Any:
    args, kwargs = call_arguments(batch)
    size, sampled = batch_size_of(args, kwargs, dims), sample_rows(args, kwargs, dims)
    for name, tensor in named_tensors(args, kwargs).items():
        assert not tensor.is_meta, name
    args, kwargs = cast_floats(args, kwargs, torch.float64)
    order = [(k + seed) % size for k in range(samples)]
    args, kwargs = with_samples(
        args, kwargs, sampled, lambda rows, x: rows.join([rows.take(x, k, 1) for k in order])
    )
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.cpu(), (args, kwargs))
    return kwargs or args

"""Weights and batches to compare with: drawn from a seed, the same for both sides."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from merakc.batches import (
    batch_size_of,
    call_arguments,
    cast_floats,
    named_tensors,
    sample_rows,
    with_samples,
)
from merakc.ir.batches import BatchDims
from merakc.sources import Source, source_of
from merakc.weights import initialise

# Added to every weight: a norm's ones and a bias's zeros would hide what becomes of them.
NOISE = 0.02
# The label that losses of torch and transformers leave out.
IGNORED = -100
# Below are the padding and the ends of a text, in most vocabularies.
FIRST_WORD = 3


def drawn_model(source: Source, seed: int) -> nn.Module:
    """A model of the source on the CPU, in float64, with weights drawn from a seed.

    A function's own model keeps its weights, but for some noise, and its modes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if source.config is not None:
            model = source_of(source.name, source.config, source.sequence, "cpu").model
        else:
            model = copy.deepcopy(source.model)
            if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
                initialise(model, seed)
        model = model.to("cpu", torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return model


def drawn_batch(source: Source, samples: int, seed: int) -> Any:
    """A batch of so many samples, floating tensors in float64.

    Of a configuration, random numbers; all samples have as many labels, and not all positions.
    A function's own batch is repeated, from another sample on for each seed.
    """
    if source.example is not None:
        return _repeated(source.example, samples, seed, source.dims)
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = call_arguments(source.batch(samples))
    assert not args, "batches of configurations are mappings"
    return {name: _drawn(name, value, source.bounds, generator) for name, value in kwargs.items()}


def _drawn(
    name: str, value: torch.Tensor, bounds: Mapping[str, int], generator: torch.Generator
) -> torch.Tensor:
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)
    bound = bounds[name]
    low = FIRST_WORD if bound > 2 * FIRST_WORD and value.dim() > 1 else 0
    found = torch.randint(low, bound, value.shape, generator=generator)
    if name == "labels" and value.dim() == 2 and value.shape[1] > 2:
        # The first is never used where the next word is to be told.
        place = torch.randint(1, value.shape[1], (value.shape[0], 1), generator=generator)
        found = found.scatter(1, place, IGNORED)
    return found


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

"""What a training gave, and how far it is from what another gave."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]

# AdamW divides by the gradient's size, and so turns the rounding of a gradient that is zero in
# theory (every key bias) into a step as long as any other. With eps as large as the learning rate
# a step is never longer than the gradient: rounding stays rounding, and can be compared.
LEARNING_RATE = 1e-2
ADAM_EPS = 1e-2
# A gradient below this share of the bound, relative to the largest gradient, is zero in theory
# (the bias of an attention's keys) and rounding in practice, and so is a buffer (the mean of what a
# norm has just centred). It has no digits to compare; that it stays as small is what can be asked.
ZERO_SHARE = 1e-2
KINDS = ("loss", "gradient", "weight", "buffer")


@dataclass(frozen=True, slots=True)
class Reference:
    """What a training gave: losses and gradients of each step, weights and buffers at the end.

    `gradients` are by parameter name, a tied parameter once; `weights` and `buffers` are the two
    kinds of the state dict, a tied parameter under every name.
    """

    losses: tuple[float, ...]
    gradients: tuple[Tensors, ...]
    weights: Tensors
    buffers: Tensors


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative difference, and of what."""

    error: float
    name: str


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of both sides."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS)


def split_state(model: nn.Module, state: Tensors) -> tuple[Tensors, Tensors]:
    """A state dict's parameters and buffers apart."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return (
        {name: value for name, value in state.items() if name in parameters},
        {name: value for name, value in state.items() if name not in parameters},
    )


def worst_differences(
    ours: Reference, losses: Iterable[Sequence[float]], reference: Reference, bound: float
) -> dict[str, Difference]:
    """The largest relative difference of each of `KINDS` of which there is anything.

    Of rank 0's tensors and of every rank's losses. Differences are relative to the largest element
    of the reference's tensor; of a gradient or buffer that is zero in theory, see `ZERO_SHARE`; of
    a weight, at least to the distance that the optimizer can have moved it.
    """
    found: dict[str, list[Difference]] = {kind: [] for kind in KINDS}
    found["loss"] = [
        Difference(_relative(abs(a - b), abs(b)), f"loss of step {step}, rank {rank}")
        for rank, steps in enumerate(losses)
        for step, (a, b) in enumerate(zip(steps, reference.losses, strict=True))
    ]
    zero = bound * ZERO_SHARE
    reach = LEARNING_RATE * len(reference.losses)
    for name, (got, wanted) in pairs(ours, reference).items():
        sizes = (_size(t) for t in wanted.values() if t.is_floating_point())
        largest = max(sizes, default=0.0)
        for key in wanted.keys() | got.keys():
            scale = _size(wanted[key]) if key in wanted else 0.0
            if name == "weight":
                scale = max(scale, reach)
            elif scale < zero * largest:
                scale = ZERO_SHARE * largest
            error = Difference(_error(key, got, wanted, scale), f"{name} of {key}")
            found[name.split()[0]].append(error)
    return {kind: max(own, key=lambda d: d.error) for kind, own in found.items() if own}


def _error(key: str, got: Tensors, wanted: Tensors, scale: float) -> float:
    """The relative difference of one tensor; infinite where it is missing or misshapen."""
    if key not in got or (key in wanted and got[key].shape != wanted[key].shape):
        return math.inf
    expected = wanted.get(key, torch.zeros(()))  # a parameter that the loss does not depend on
    return _relative(_size(got[key].double() - expected.double()), scale)


def _relative(difference: float, scale: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 else math.inf


def _size(tensor: torch.Tensor) -> float:
    """The largest absolute element."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def pairs(one: Reference, other: Reference) -> Mapping[str, tuple[Tensors, Tensors]]:
    """Everything but the losses, by a name to report it by."""
    steps = enumerate(zip(one.gradients, other.gradients, strict=True))
    return {
        **{f"gradient of step {step}": pair for step, pair in steps},
        "weight": (one.weights, other.weights),
        "buffer": (one.buffers, other.buffers),
    }

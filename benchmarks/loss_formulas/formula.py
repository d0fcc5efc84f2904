"""A loss formula, and the small model whose features it is a loss of.

The shapes have no size in common with the batch, so that nothing but the samples has theirs, but
for the formulas that are made to mislead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 8
CLASSES, STEPS, WORDS = 6, 5, 7
IGNORED = -100
# Labels of samples and of steps: the third of four micro-batches has none, others one alone.
LABELS = (3, IGNORED, 1, 5, IGNORED, IGNORED, 0, 2)
LABELLED_STEPS = (5, 1, 3, 0, 0, 0, 4, 2)
MASK = (1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0)

# Inputs that only some formulas ask for, and the dim of each that holds samples, if any does.
EXTRA_DIMS = {"frames": 1, "frame_labels": 1, "images": 0, "class_weight": None}


class Named:
    """Tensors by attribute: those of a batch, or parameters."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise AttributeError(name) from None


Loss = Callable[[Tensor, Named, Named], Tensor]


def square(z: Tensor, b: Named) -> Tensor:
    """Of each sample's distance from its target."""
    return (z - b.target).pow(2).sum(1)


@dataclass(frozen=True, slots=True)
class Formula:
    """A loss of features, of the batch and of parameters.

    The features are `[samples, CLASSES]`, or `[samples, STEPS, WORDS]` where `tokens`. `draws` says
    that random numbers are drawn, so that only merakc itself can say what one process gives;
    `extra` names inputs that the model takes beside the usual ones.
    """

    name: str
    family: str
    loss: Loss
    tokens: bool = False
    draws: bool = False
    extra: tuple[str, ...] = ()


def formulas(
    family: str,
    losses: Mapping[str, Loss],
    *,
    tokens: bool = False,
    draws: bool = False,
    extra: tuple[str, ...] = (),
) -> tuple[Formula, ...]:
    """Formulas of one family that are alike in all but the loss."""
    return tuple(Formula(name, family, loss, tokens, draws, extra) for name, loss in losses.items())


class Small(nn.Module):
    """Three layers, and the loss of a formula, which may use the parameters of `own`.

    Where the formula has `frames` (time first) or `images` (two a sample), they go through the
    same layers; `batch.frame_features` and `batch.image_features` are what comes out.
    """

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula
        width = CLASSES
        self.enter = nn.Embedding(WORDS, width) if formula.tokens else nn.Linear(5, width)
        self.middle = nn.Linear(width, width)
        self.leave = nn.Linear(width, WORDS if formula.tokens else CLASSES)
        shapes = {
            "s": (2,), "tau": (), "w": (CLASSES,), "mix": (CLASSES, CLASSES), "gate": (WORDS, 4),
            "proto": (4, CLASSES), "widen": (CLASSES, SAMPLES), "eight": (SAMPLES,),
            "square": (SAMPLES, SAMPLES),
        }  # fmt: skip
        self.own = nn.ParameterDict({n: 0.5 * torch.randn(shape) for n, shape in shapes.items()})

    def features(self, x: Tensor) -> Tensor:
        """What the layers make of an input."""
        features: Tensor = self.leave(self.middle(self.enter(x).tanh()).tanh())
        return features

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """The loss."""
        made = {
            name.removesuffix("s") + "_features": self.features(batch[name])
            for name in ("frames", "images")
            if name in batch
        }
        features = self.features(batch["ids" if self.formula.tokens else "x"])
        own = Named(dict(self.own.items()))
        return {"loss": self.formula.loss(features, Named({**batch, **made}), own)}


def build(formula: Formula) -> Small:
    """The model in float64, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small(formula).double()


def whole_batch(formula: Formula) -> dict[str, Tensor]:
    """Eight samples whose labels, masks and weights lie unevenly."""
    n, g = SAMPLES, torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=g)

    labelled = torch.arange(STEPS) < torch.tensor(LABELLED_STEPS)[:, None]
    classes = torch.tensor([2, 0, 2, 5, 1, 2, 0, 3])
    batch = {
        "x": normal(n, 5),
        "ids": whole(WORDS, n, STEPS),
        "y": torch.tensor(LABELS),
        "c": classes,
        "target": normal(n, CLASSES),
        "prob": normal(n, CLASSES).softmax(1),
        "bits": F.one_hot(classes, CLASSES).double() + (whole(3, n, CLASSES) == 0),
        "sign": torch.tensor([1.0, 1, -1, -1, 1, -1, -1, -1]).double(),
        "weight": normal(n).exp(),
        "mask": torch.tensor(MASK).double(),
        "time": normal(n).exp(),
        "group": torch.tensor([0, 1, 1, 2, 0, 0, 1, 0]),
        "labels": whole(WORDS, n, STEPS).where(labelled, torch.tensor(IGNORED)),
        "valid": labelled.double(),
        "value": normal(n, STEPS),
        "multi": torch.stack([torch.randperm(CLASSES, generator=g) for _ in range(n)]),
    }
    batch["bits"] = batch["bits"].clamp(max=1)
    batch["multi"][:, 3:] = -1
    batch["multi"][::2, 1:] = -1
    extra = {
        "frames": whole(WORDS, STEPS, n),
        "frame_labels": batch["labels"].T.contiguous(),
        "images": normal(2 * n, 5),
        "class_weight": normal(CLASSES).exp(),
    }
    return {**batch, **{name: extra[name] for name in formula.extra}}


def samples_between(batch: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    """A part of a batch: the samples from `first` to before `last`."""
    found = {}
    for name, tensor in batch.items():
        dim = EXTRA_DIMS.get(name, 0)
        if dim is not None:
            each = tensor.shape[dim] // SAMPLES
            tensor = tensor.narrow(dim, first * each, (last - first) * each)
        found[name] = tensor
    return found

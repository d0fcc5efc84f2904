"""Cases of the families of timm and torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from benchmarks.models import CLASSES, ModelCase, images, unshifted
from benchmarks.zoo_models import plain_families as plain

_IMAGE, _WIDTH, _HEADS, _WINDOW = 32, 16, 4, 4
_PLACES = (_IMAGE // 4) ** 2


def _case(
    name: str, block: Callable[[], nn.Module], outputs: int = _WIDTH, *, norms: bool = True
) -> ModelCase:
    """A stem that makes the image four times smaller, and four blocks."""

    def build(dropout: float) -> nn.Module:
        stem = nn.Conv2d(3, _WIDTH, 4, 4)
        blocks = [block() for _ in range(4 if outputs == _WIDTH else 1)]
        last = nn.Identity() if outputs == _WIDTH else nn.Conv2d(outputs, outputs, 1)
        features = nn.Sequential(stem, *blocks, last)
        return plain.Classifier(features, outputs, CLASSES, dropout)

    return ModelCase(name, build, partial(images, _IMAGE), unshifted, running_statistics=norms)


NEW_FAMILIES = (
    _case("densenet", lambda: plain.Dense(_WIDTH, 8, 4), _WIDTH + 32, norms=False),
    _case("squeezenet", lambda: plain.Fire(_WIDTH, 8, _WIDTH), norms=False),
    _case("shufflenet", lambda: plain.Shuffle(_WIDTH)),
    _case("inception", lambda: plain.Inception(_WIDTH, 4)),
    _case("ghostnet", lambda: plain.Ghost(_WIDTH, _WIDTH)),
    _case("nfnet", lambda: plain.Standardised(_WIDTH, _WIDTH, 3, padding=1), norms=False),
    _case("repvgg", lambda: plain.Reparametrised(_WIDTH)),
    _case("xcit", lambda: plain.CrossCovariance(_WIDTH, _HEADS), norms=False),
    _case("maxvit", lambda: plain.WindowsAndGrid(_WIDTH, _HEADS, _WINDOW), norms=False),
    _case("gmlp", lambda: plain.SpatialGate(_WIDTH, _PLACES), norms=False),
)

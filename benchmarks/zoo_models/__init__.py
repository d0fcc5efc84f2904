"""The zoo: stock architectures of all families, tiny, as they come."""

from __future__ import annotations

from benchmarks.models import MODELS, ModelCase
from benchmarks.zoo_models.decoders import DECODERS
from benchmarks.zoo_models.encoder_decoders import ENCODER_DECODERS
from benchmarks.zoo_models.encoders import ENCODERS
from benchmarks.zoo_models.experts import EXPERTS
from benchmarks.zoo_models.families import NEW_FAMILIES
from benchmarks.zoo_models.mixed import MIXED
from benchmarks.zoo_models.new_decoders import NEW_DECODERS
from benchmarks.zoo_models.new_mixed import NEW_MIXED
from benchmarks.zoo_models.new_texts import NEW_TEXTS
from benchmarks.zoo_models.new_vision import NEW_VISION
from benchmarks.zoo_models.packages import PACKAGES
from benchmarks.zoo_models.plain import PLAIN
from benchmarks.zoo_models.vision import VISION

FAMILIES: dict[str, tuple[ModelCase, ...]] = {
    "equivalence table": tuple(MODELS.values()),
    "decoders": DECODERS,
    "more decoders": NEW_DECODERS,
    "experts": EXPERTS,
    "more texts": NEW_TEXTS,
    "more vision": NEW_VISION,
    "more mixed": NEW_MIXED,
    "encoders": ENCODERS,
    "encoder-decoders": ENCODER_DECODERS,
    "vision": VISION,
    "mixed": MIXED,
    "plain PyTorch": (*PLAIN, *NEW_FAMILIES),
    "other packages": PACKAGES,
}

ZOO: dict[str, ModelCase] = {case.name: case for family in FAMILIES.values() for case in family}

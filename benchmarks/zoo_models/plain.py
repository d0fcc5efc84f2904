"""The cases that are not from transformers: plain `torch.nn`."""

from __future__ import annotations

from functools import partial

from benchmarks.models import (
    CLASSES,
    EVEN_VOCABULARY,
    HEADS,
    HIDDEN,
    IGNORED,
    IMAGE,
    LAYERS,
    ODD_VOCABULARY,
    SEQUENCE,
    ModelCase,
    images,
    text_to_text_batch,
    unshifted,
)
from benchmarks.zoo_models.batches import (
    clicks,
    graphs,
    labelled_pixels,
    noisy_images,
    plain_text,
    samples,
    segments,
)
from benchmarks.zoo_models.plain_other import GraphNetwork, Recommender, SoftExperts
from benchmarks.zoo_models.plain_text import (
    CausalConvolutions,
    LSTMLanguageModel,
    MinimalGPT,
    Translator,
)
from benchmarks.zoo_models.plain_vision import Autoencoder, DiT, MLPMixer, UNet

_WIDTH = 8
_GRAPH_NODES = 10
_FIELDS, _VALUES, _NUMBERS = 5, 20, 6
_ODD = partial(plain_text, ODD_VOCABULARY)
_IMAGES = partial(images, IMAGE)
_CLICKS = partial(clicks, _FIELDS, _VALUES, _NUMBERS)

PLAIN = (
    ModelCase(
        "nn_transformer",
        lambda p: Translator(EVEN_VOCABULARY, SEQUENCE, HIDDEN, HEADS, 2, p),
        partial(text_to_text_batch, EVEN_VOCABULARY),
        unshifted,
    ),
    ModelCase("lstm", lambda p: LSTMLanguageModel(ODD_VOCABULARY, HIDDEN, p), _ODD, samples),
    ModelCase(
        "wavenet",
        lambda p: CausalConvolutions(EVEN_VOCABULARY, HIDDEN, LAYERS, p),
        partial(plain_text, EVEN_VOCABULARY),
        samples,
    ),
    ModelCase(
        "minimal_gpt",
        lambda p: MinimalGPT(ODD_VOCABULARY, SEQUENCE, HIDDEN, HEADS, LAYERS, p),
        _ODD,
        samples,
    ),
    ModelCase("mlp_mixer", lambda p: MLPMixer(IMAGE, 4, HIDDEN, LAYERS, CLASSES, p), _IMAGES,
              unshifted),
    ModelCase("autoencoder", lambda _: Autoencoder(IMAGE, _WIDTH, HIDDEN), _IMAGES, samples),
    ModelCase(
        "unet",
        lambda _: UNet(_WIDTH, CLASSES),
        partial(segments, IMAGE, IGNORED),
        labelled_pixels(IGNORED),
        running_statistics=True,
    ),
    ModelCase(
        "dit",
        lambda p: DiT(
            IMAGE, 4, 4, hidden=HIDDEN, heads=HEADS, layers=LAYERS, classes=CLASSES, dropout=p
        ),
        partial(noisy_images, 4),
        samples,
    ),
    ModelCase(
        "graph_network",
        lambda _: GraphNetwork(_NUMBERS, HIDDEN, LAYERS, CLASSES),
        partial(graphs, _GRAPH_NODES, _NUMBERS),
        unshifted,
    ),
    ModelCase("recommender", lambda p: Recommender(_FIELDS, _VALUES, _NUMBERS, HIDDEN, p), _CLICKS,
              samples),
    ModelCase("soft_experts", lambda _: SoftExperts(_NUMBERS, HIDDEN, 4, LAYERS), _CLICKS, samples),
)  # fmt: skip

"""Batches of the zoo that the models of the equivalence table have no use for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.models import (
    CLASSES,
    EVEN_VOCABULARY,
    FRAMES,
    IMAGE,
    MELS,
    SEQUENCE,
    Batch,
    causal_batch,
    text_to_text_batch,
    words,
)

PATCHES = 4  # image tokens in front of a multi-modal text
IMAGE_WORD = 3  # their id


def samples(batch: Batch) -> int:
    """For losses that are a mean over the samples, or over equally many elements of each."""
    return len(next(iter(batch.values())))


def segments(size: int, ignored: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Images and a class for each pixel, a tenth of them `ignored`."""
    pixels = torch.randn(batch_size, 3, size, size, generator=generator)
    labels = torch.randint(0, CLASSES, (batch_size, size, size), generator=generator)
    dropped = torch.rand(labels.shape, generator=generator) < 0.1
    return {"pixel_values": pixels, "labels": labels.masked_fill(dropped, ignored)}


def labelled_pixels(ignored: int) -> Callable[[Batch], int]:
    """Counts the pixels that have a class."""
    return lambda batch: int((batch["labels"] != ignored).sum())


def sounds(length: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Waves `[batch, length]` and their classes."""
    waves = torch.randn(batch_size, length, generator=generator)
    labels = torch.randint(0, CLASSES, (batch_size,), generator=generator)
    return {"input_values": waves, "labels": labels}


def spectra_and_text(vocabulary: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Spectra `[batch, frames, mels]` and the words spoken."""
    text = text_to_text_batch(vocabulary, batch_size, generator)
    sound = torch.randn(batch_size, FRAMES, MELS, generator=generator)
    return {"input_features": sound, "labels": text["labels"]}


def images_and_text(
    vocabulary: int, size: int, batch_size: int, generator: torch.Generator, *, labels: bool
) -> Batch:
    """An image beside each padded text; with `labels`, the text is to be predicted."""
    batch = causal_batch(vocabulary, batch_size, generator)
    if not labels:
        del batch["labels"]
    pixels = torch.randn(batch_size, 3, size, size, generator=generator)
    return {**batch, "pixel_values": pixels}


def images_in_text(batch_size: int, generator: torch.Generator) -> Batch:
    """Texts that begin with the places of an image's patches."""
    batch = images_and_text(EVEN_VOCABULARY, IMAGE, batch_size, generator, labels=True)
    ids, labels = batch["input_ids"], batch["labels"]
    batch["input_ids"] = torch.where(ids == IMAGE_WORD, IMAGE_WORD + 1, ids)
    batch["input_ids"][:, :PATCHES] = IMAGE_WORD
    batch["attention_mask"][:, : PATCHES + 2] = 1  # no sample without a label
    batch["labels"] = torch.where(labels == IMAGE_WORD, IMAGE_WORD + 1, labels)
    batch["labels"][:, :PATCHES] = -100
    batch["labels"][:, PATCHES : PATCHES + 2] = IMAGE_WORD + 2
    return batch


def noisy_images(channels: int, batch_size: int, generator: torch.Generator) -> Batch:
    """What a diffusion model is trained on: noisy images, times, classes and the noise."""
    shape = (batch_size, channels, IMAGE, IMAGE)
    return {
        "sample": torch.randn(shape, generator=generator),
        "timestep": torch.randint(0, 1000, (batch_size,), generator=generator),
        "class_labels": torch.randint(0, CLASSES, (batch_size,), generator=generator),
        "target": torch.randn(shape, generator=generator),
    }


def plain_text(vocabulary: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Unpadded sequences, each of whose words is to be predicted from those before it."""
    return {"input_ids": words((batch_size, SEQUENCE + 1), generator, vocabulary)}


def graphs(nodes: int, features: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Random undirected graphs: node features, a normalised adjacency and a class for each node."""
    edges = torch.rand(batch_size, nodes, nodes, generator=generator) < 0.3
    linked = (edges | edges.transpose(1, 2)).float()
    linked.diagonal(dim1=1, dim2=2).fill_(1.0)
    degree = linked.sum(-1).rsqrt()
    labels = torch.randint(0, CLASSES, (batch_size, nodes), generator=generator)
    dropped = torch.rand(labels.shape, generator=generator) < 0.3
    dropped[:, 0] = False
    return {
        "features": torch.randn(batch_size, nodes, features, generator=generator),
        "adjacency": linked * degree[:, :, None] * degree[:, None, :],
        "labels": labels.masked_fill(dropped, -100),
    }


def clicks(
    fields: int, values: int, dense: int, batch_size: int, generator: torch.Generator
) -> Batch:
    """What a recommender sees: categories, numbers, and whether there was a click."""
    return {
        "categories": torch.randint(0, values, (batch_size, fields), generator=generator),
        "numbers": torch.randn(batch_size, dense, generator=generator),
        "clicked": torch.rand(batch_size, generator=generator).round(),
    }
